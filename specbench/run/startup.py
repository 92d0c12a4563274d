"""The start of a command: its imports, without garbage collection, and warnings that say nothing to its user."""

import gc
import sys
import warnings


def importing() -> None:
    """Switches garbage collection off until `imported`, unless torch is loaded already. It and transformers are some
    million objects that are never garbage, and to look through them takes most of a second."""
    if "torch" not in sys.modules:
        gc.disable()


def imported() -> None:
    """Switches garbage collection on again."""
    gc.enable()


def quiet() -> None:
    """Hydra checks our configuration of a launcher against the launcher's own types, as it should, and warns that a
    later version will not."""
    warnings.filterwarnings("ignore", message=r"\s*'hydra/launcher/\w+' is validated against ConfigStore schema")
