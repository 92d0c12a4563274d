"""The lock of a run's folder: one process at a time writes into it, or removes it."""

import errno
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from specbench.errors import ConfigError
from specbench.results.atomic_files import remove_half_written, writing

log = logging.getLogger(__name__)
LOCK = ".lock"  # holds the number of the process that has the lock
LOOK = 0.5  # seconds between two looks at a lock that another process holds
WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # of some network file systems


@contextmanager
def locked(folder: Path, wait: float = 0.0) -> Iterator[None]:
    """Holds the folder's lock, which ends with the process, however that ends. Removes what killed processes have left
    half-written. Raises ConfigError if another process holds the lock, and goes on holding it for `wait` seconds."""
    path = folder / LOCK
    lock = FileLock(path, mode=0o666, fallback_to_soft=False)
    try:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        with writing(path):
            _take(lock, folder, wait)
            path.write_text(str(os.getpid()))
            remove_half_written(folder)
        yield
    finally:
        lock.release(force=True)


def _take(lock: FileLock, folder: Path, wait: float) -> None:
    try:
        lock.acquire(timeout=wait, poll_interval=LOOK)
    except Timeout as error:
        owner = (folder / LOCK).read_text(errors="replace")[:20]
        raise ConfigError(
            f"{folder} is being written by process {owner or '(unknown)'}: wait for it, or choose another folder"
        ) from error
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise
        log.warning("%s cannot be locked (%s): no other run may write into it now", folder, error.strerror)


def remove_if_empty(folder: Path) -> None:
    """Removes a folder of a run that never began, with what Hydra has put there, and the folders above it, up to
    outputs/, that are then empty. Leaves a folder that another process writes into, and the working folder."""
    if not folder.is_dir() or not {path.name for path in folder.iterdir()} <= {".hydra", "run.log", LOCK}:
        return
    try:
        with locked(folder):
            shutil.rmtree(folder, ignore_errors=True)
        for above in folder.parents if "outputs" in folder.parts else ():
            if above.resolve() in (Path.cwd(), *Path.cwd().parents):
                break
            above.rmdir()
            if above.name == "outputs":
                break
    except (ConfigError, OSError):  # in use, or not empty
        return
