"""The lock of a run's folder: one process at a time writes into it."""

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specbench.errors import ConfigError
from specbench.results.atomic_files import TEMPORARY, writing

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger(__name__)
LOCK = ".lock"
LOOK = 0.5  # seconds between two looks at a lock that another process holds


@contextmanager
def locked(folder: Path, wait: float = 0.0) -> Iterator[None]:
    """Holds the folder's lock, which ends with the process, however that ends. Removes what killed processes have left
    half-written. Raises ConfigError if another process holds the lock, and goes on holding it for `wait` seconds."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with writing(folder / LOCK):
        file = os.fdopen(os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0)
    with file:
        _take(file.fileno(), folder, time.monotonic() + wait)
        with writing(folder / LOCK):
            file.truncate()
            file.write(str(os.getpid()).encode())
            for left in folder.glob(f"*{TEMPORARY}"):
                if left.is_file():
                    left.unlink()
        yield


def _take(descriptor: int, folder: Path, until: float) -> None:
    if fcntl is None:
        return
    try:
        while True:
            try:
                return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise
            time.sleep(LOOK)
    except BlockingIOError as error:
        owner = os.pread(descriptor, 20, 0).decode(errors="replace")
        raise ConfigError(
            f"{folder} is being written by process {owner or '(unknown)'}: wait for it, or choose another folder"
        ) from error
    except OSError as error:  # some network file systems have no locks
        log.warning("%s cannot be locked (%s): no other run may write into it now", folder, error.strerror)
