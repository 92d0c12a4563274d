"""Folders of runs that never began."""

import shutil
from pathlib import Path

from specbench.errors import ConfigError
from specbench.results.folder_lock import LOCK, locked


def remove_if_empty(folder: Path) -> None:
    """Removes a folder of a run that never began, with what Hydra has put there, and the folders above it, up to
    outputs/, that are then empty. Leaves a folder that another process writes into, and the working folder."""
    hydras = {".hydra", "run.log", LOCK}
    if not folder.is_dir() or not {path.name for path in folder.iterdir()} <= hydras:
        return
    kept = {Path.cwd(), *Path.cwd().parents}
    try:
        with locked(folder):
            shutil.rmtree(folder, ignore_errors=True)
        for above in folder.parents if "outputs" in folder.parts else ():
            if above.resolve() in kept:
                break
            above.rmdir()
            if above.name == "outputs":
                break
    except (ConfigError, OSError):  # in use, or not empty
        return
