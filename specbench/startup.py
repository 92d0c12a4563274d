"""The imports of a command, without garbage collection."""

import gc
import sys


def importing() -> None:
    """Switches garbage collection off until `imported`, unless torch is loaded already. It and transformers are some
    million objects that are never garbage, and to look through them takes most of a second."""
    if "torch" not in sys.modules:
        gc.disable()


def imported() -> None:
    """Switches garbage collection on again."""
    gc.enable()
