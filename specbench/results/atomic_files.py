"""Reads files, and writes them so that a reader never sees half of one; errors are sentences."""

import errno
import json
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO, TextIOWrapper
from pathlib import Path
from typing import Any

from specbench.errors import ConfigError, first_line

EARLIER = "earlier-"  # begins the names of folders of earlier runs, inside of a run's folder
ASIDE = "corrupt-"  # likewise of files that cannot be used
PART = "prompts.jsonl.part"  # what a run that is not over has decoded
GROUPS = "groups.part"  # likewise, with all that another process needs to go on from there
TEMPORARY = ".tmp"  # ends the names of files that are being written
FULL = (errno.ENOSPC, errno.EDQUOT)
ROOM_SECONDS, LOOK_SECONDS = 120.0, 5.0  # that a run waits for room on a full disk, and between two attempts
log = logging.getLogger(__name__)


def refuse_no_run(folder: Path) -> None:
    """Raises ConfigError if the folder has no results of a run."""
    if not (folder / "results.json").exists():
        raise ConfigError(f"{folder} is not a finished run: results.json is not there")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises ConfigError, naming the path, for an error of the file system."""
    try:
        yield
    except BrokenPipeError:  # of what reads the output, not of a file
        raise
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written ({error.strerror or error}): make room for it, or choose another folder; what "
            "was finished before stays"
        ) from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary name beside the path; what was written there is on the disk when it takes the path's place.
    Raises ConfigError."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}{TEMPORARY}")
    with writing(path):
        try:
            temporary.unlink(missing_ok=True)  # a link there would lead elsewhere
            yield temporary
            synchronise(temporary)
            os.replace(temporary, path)
            synchronise(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def with_room(write: Callable[[], None]) -> None:
    """Writes what was decoded; where the disk is full, again and again until there is room, for ROOM_SECONDS at most.
    Raises ConfigError as `write` does."""
    end, told = time.monotonic() + ROOM_SECONDS, False
    while True:
        try:
            return write()
        except ConfigError as error:
            cause = error.__cause__
            if not isinstance(cause, OSError) or cause.errno not in FULL or time.monotonic() >= end:
                raise
            if not told:
                log.warning("%s; the run waits %g s for room", error, ROOM_SECONDS)
            told = True
            time.sleep(LOOK_SECONDS)


def open_no_link(path: str, flags: int) -> int:
    """For `open`: the file itself, and no other that a link there names. Raises OSError."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


class LogFile(logging.FileHandler):
    """Writes run.log. Hydra opens it before it writes `.hydra`, so it raises OSError for a link there too."""

    def _open(self) -> TextIOWrapper:
        folder = Path(self.baseFilename).with_name(".hydra")
        for path in (folder, *folder.glob("*")):
            if path.is_symlink():
                raise OSError(errno.ELOOP, f"{path.name} is a link", str(path))
        return open(self.baseFilename, "a", encoding=self.encoding, errors=self.errors, opener=open_no_link)


class PartFile:
    """A file that grows while a run goes on."""

    def __init__(self, path: Path, mode: str):
        """`mode` is that of `open`. Raises ConfigError if it cannot be written."""
        self.path, self.mode = path, mode
        self._open()

    def _open(self) -> None:
        """Opens the file, or makes it. Raises ConfigError."""
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.file = FileIO(self.path, self.mode, opener=open_no_link)

    def close(self) -> None:
        self.file.close()

    def write(self, content: bytes) -> None:
        """Appends the whole of it or, where the disk stays full, nothing. Raises ConfigError."""
        with_room(lambda: self._write(memoryview(content)))

    def cut(self, end: int) -> None:
        """Removes what stands from there on. Raises ConfigError."""
        with writing(self.path):
            self.file.truncate(self.file.seek(end))

    def _write(self, rest: memoryview) -> None:
        whole = self.file.tell()
        with writing(self.path):
            try:
                while rest:
                    rest = rest[self.file.write(rest) :]
            except OSError:
                self.cut(whole)
                raise


def synchronise(path: Path) -> None:
    """Returns when the file, or the names in the folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Replaces the file. Raises ConfigError."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


def write_json(path: Path, value: Any) -> None:
    """Writes indented JSON, as `write_text` does."""
    write_text(path, as_json(value))


def as_json(value: Any) -> str:
    """A value as a file holds it."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def file_text(path: Path) -> str:
    """A file's text. Raises ConfigError."""
    try:
        refuse_no_file(path)
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({reason(error)})") from error


def refuse_no_file(path: Path) -> None:
    """Raises OSError for what never ends, or never begins: a device, or a pipe."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError("it is not a file")


def reason(error: Exception) -> str:
    """Why a file could not be used, without its path."""
    return str(getattr(error, "strerror", None) or first_line(error))


def parse_json(text: str, where: str) -> Any:
    """The value of a JSON text. Raises ConfigError."""
    try:
        return json.loads(text, parse_int=_integer)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON ({reason(error)})") from error


def _integer(digits: str) -> int:
    if len(digits) > 300:  # more than a float has
        raise ValueError(f"an integer of {len(digits)} digits")
    return int(digits)


def remove_half_written(folder: Path, below: bool = False) -> None:
    """Removes what killed processes have left half-written in a folder and, with `below`, in those below it."""
    for left in (folder.rglob if below else folder.glob)(f"*{TEMPORARY}"):
        if left.is_file():
            left.unlink(missing_ok=True)
