"""A file that grows by values of any class, and is read by this user's programs alone.

A pickle can run code, so each is signed, with all that stands before it, by a key that only this user can read. What
another one has put there is not read, and what was not written to its end is removed.
"""

import hmac
import itertools
import logging
import os
import pickle
import secrets
import stat
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

from specbench.errors import first_line
from specbench.executors.machine import cache_dir
from specbench.results.atomic_files import PartFile, open_no_link, replacing, writing

log = logging.getLogger(__name__)
OLD = ".old"  # follows the name of a file that cannot be used
KEY_BYTES, SIZE_BYTES = 32, 8
HEAD = KEY_BYTES + SIZE_BYTES  # a signature and the number of the bytes that follow


class SignedFile(PartFile):
    """Values of earlier processes, `found`, behind which this one appends its own."""

    def __init__(self, path: Path, most: int | None = None):
        """With `most` only so many values are read, and the file stays as it is. Raises ConfigError if the file cannot
        be opened."""
        super().__init__(path, "a+")
        self._key = own_key()
        self._load(most)

    def _load(self, most: int | None = None) -> None:
        self._ends = [(0, b"")]  # where values end, and their signatures
        self.found: list[Any] = []
        why = self._read(most)
        if why and most is None:
            self.set_aside(why, len(self.found))
        elif most is None:
            self.cut(self._ends[-1][0])

    def clear(self) -> None:
        """Removes all values."""
        self.found, self._ends = [], self._ends[:1]
        self.cut(0)

    def exchange(self, first: Any, why: str) -> None:
        """Sets all values aside, and takes those that begin with `first`, if there are any that were set aside before.
        Raises ConfigError."""
        if self.found[1:]:
            self.set_aside(why, 0)
        else:
            self.clear()
        olds = self.path.parent.glob(f"{self.path.name}{OLD}*") if self._key else ()
        for old in sorted(olds, key=lambda old: old.lstat().st_mtime_ns, reverse=True):
            with closing(SignedFile(old, most=1)) as kept:
                wanted = kept.found == [first]
            if wanted:
                self.close()
                with writing(self.path):
                    os.replace(old, self.path)
                self._open()
                return self._load()

    def set_aside(self, why: str, count: int) -> None:
        """Keeps the file under another name, and goes on with its first `count` values. Raises ConfigError."""
        names = (self.path.with_name(f"{self.path.name}{OLD}-{number}") for number in itertools.count(1))
        old = next(name for name in names if not os.path.lexists(name))
        self.found, self._ends = self.found[:count], self._ends[: count + 1]
        self.file.seek(0)
        first = self.file.read(self._ends[-1][0])
        self.close()
        with replacing(self.path) as temporary:
            temporary.write_bytes(first)
            os.rename(self.path, old)
        self._open()
        log.warning("%s is not used%s: %s; it is %s now", self.path, " to its end" if first else "", why, old.name)

    def append(self, value: Any) -> None:
        """Appends a value, the whole of it or, where the disk stays full, nothing. Raises ConfigError. Without a key
        nothing is kept."""
        if self._key is None:
            return
        body = pickle.dumps(value)
        signature = self._signature(body)
        self.write(signature + len(body).to_bytes(SIZE_BYTES) + body)
        self._ends.append((self.file.tell(), signature))

    def _signature(self, body: bytes) -> bytes:
        assert self._key is not None
        return hmac.digest(self._key, self._ends[-1][1] + body, "sha256")

    def _read(self, most: int | None) -> str:
        """Finds all values up to the first that is not whole, or not this user's: why what follows cannot be used; ""
        if nothing follows, or it is not whole."""
        size = self.file.seek(0, os.SEEK_END)
        self.file.seek(0)
        if self._key is None:
            return "there is no key" if size else ""
        while len(self.found) != most and len(head := self.file.read(HEAD)) == HEAD:
            signature, length = head[:KEY_BYTES], int.from_bytes(head[KEY_BYTES:])
            body = self.file.read(min(length, size))
            if len(body) != length:
                break
            if not hmac.compare_digest(signature, self._signature(body)):
                return "it is damaged, or was signed by another key"
            try:
                self.found.append(pickle.loads(body))
            except Exception as error:  # of another version of the program
                return f"it cannot be read ({first_line(error)})"
            self._ends.append((self.file.tell(), signature))
        return ""


def own_key() -> bytes | None:
    """A key that lies in the user's cache folder, made at the first time; None, with a warning, if there is none."""
    path = cache_dir() / "key"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            _make_key(path)
        with open(path, "rb", opener=open_no_link) as file:
            about, key = os.fstat(file.fileno()), file.read(KEY_BYTES + 1)
        mode = stat.S_IMODE(about.st_mode)
        if about.st_uid != os.getuid():
            wrong = "it is another user's"
        elif mode & 0o077:
            wrong = f"its mode is {mode:o}, not 600"
        elif len(key) != KEY_BYTES:
            wrong = f"it has {about.st_size} bytes, not {KEY_BYTES}"
        else:
            return key
    except OSError as error:
        wrong = error.strerror or str(error)
    log.warning("the key %s cannot be used (%s): if this run is killed, it cannot be continued", path, wrong)
    return None


def _make_key(path: Path) -> None:
    """Raises OSError."""
    descriptor, temporary = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)  # for this user alone
    try:
        with open(descriptor, "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
        os.link(temporary, path)  # of two processes the first one's
    except FileExistsError:
        pass
    except OSError:
        if path.exists():
            raise
        os.replace(temporary, path)  # where there are no hard links
    finally:
        Path(temporary).unlink(missing_ok=True)
