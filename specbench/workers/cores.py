"""Cores of this machine that one process has for itself: a lock file for each, which ends with the process."""

import os
import tempfile
from pathlib import Path
from typing import IO

from specbench.config.split import cores
from specbench.settings import ConfigError

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

_held: list[IO[bytes]] = []  # until the process ends


def folder() -> Path:
    """Where the lock files of this machine are."""
    owner = os.getuid() if hasattr(os, "getuid") else 0
    return Path(tempfile.gettempdir()) / f"specbench-cores-{owner}"


def claim(count: int) -> list[int]:
    """Takes so many cores that no other worker of this user has, and lets this process and its threads run nowhere
    else. Returns their numbers. Raises ConfigError if there are fewer."""
    there = cores()
    found = [core for core in there if _take(core, count)][:count] if fcntl else there[:count]
    if len(found) < count:
        raise ConfigError(
            f"a worker needs {count} core{'s' * (count > 1)} of its own, and {len(found)} of the {len(there)} on "
            f"{os.uname().nodename} {'is' if len(found) == 1 else 'are'} free: use a lower workers, or wait for the "
            "other run"
        )
    _pin(found)
    return found


def _take(core: int, most: int) -> bool:
    """Whether the core's lock could be had; not more than `most` are taken."""
    if len(_held) >= most:
        return False
    folder().mkdir(exist_ok=True)
    file = (folder() / f"core-{core}").open("wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return False
    _held.append(file)
    return True


def _pin(cores: list[int]) -> None:
    """Binds all threads that there are; those that they start inherit it."""
    if not hasattr(os, "sched_setaffinity"):
        return
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)
