"""The imports of a command, without garbage collection, and its end."""

import atexit
import gc
import os
import sys
import threading


def importing() -> None:
    """Switches garbage collection off until `imported`, unless torch is loaded already. It and transformers are some
    million objects that are never garbage, and to look through them takes most of a second."""
    if "torch" not in sys.modules:
        gc.disable()


def imported() -> None:
    """Switches garbage collection on again."""
    gc.enable()


def leave() -> None:
    """Ends the process with exit code 0. Threads are waited for and what is registered for the end runs, but modules
    are not taken apart one by one, which for torch takes a second."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
