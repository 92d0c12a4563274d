"""A file that grows by values of any class, and is read by this user's programs alone.

A pickle can run code, so each is signed, with all that stands before it, by a key that only this user can read. What
another one has put there is not read, and what was not written to its end is removed.
"""

import hmac
import logging
import os
import pickle
import secrets
import stat
import tempfile
from pathlib import Path
from typing import Any

from specbench.errors import first_line
from specbench.executors.machine import cache_dir
from specbench.results.atomic_files import PartFile, open_no_link, writing

log = logging.getLogger(__name__)
OLD = ".old"  # ends the name of a file that cannot be used
KEY_BYTES, SIZE_BYTES = 32, 8
HEAD = KEY_BYTES + SIZE_BYTES  # a signature and the number of the bytes that follow


class SignedFile(PartFile):
    """Values of earlier processes, `found`, behind which this one appends its own."""

    def __init__(self, path: Path):
        """Raises ConfigError if the file cannot be opened."""
        super().__init__(path, "a+")
        self._key, self._last = own_key(), b""
        self.found: list[Any] = []
        end, why = self._read()
        if why:
            self._set_aside(why, end)
        else:
            self.cut(end)

    def clear(self) -> None:
        """Removes all values."""
        self._last, self.found = b"", []
        self.cut(0)

    def set_aside(self, why: str) -> None:
        """Keeps all values under another name, and goes on without. Raises ConfigError."""
        self._last, self.found = b"", []
        self._set_aside(why, 0)

    def _set_aside(self, why: str, end: int) -> None:
        """The new file has what stands before `end`."""
        old = self.path.with_name(self.path.name + OLD)
        self.file.seek(0)
        first = self.file.read(end)
        self.close()
        with writing(old):
            os.replace(self.path, old)
        self._open()
        self.write(first)
        log.warning("%s is not used%s: %s; it is %s now", self.path, " to its end" if end else "", why, old.name)

    def append(self, value: Any) -> None:
        """Appends a value, the whole of it or, where the disk stays full, nothing. Raises ConfigError. Without a key
        nothing is kept."""
        if self._key is None:
            return
        body = pickle.dumps(value)
        signature = self._signature(body)
        self.write(signature + len(body).to_bytes(SIZE_BYTES) + body)
        self._last = signature

    def _signature(self, body: bytes) -> bytes:
        assert self._key is not None
        return hmac.digest(self._key, self._last + body, "sha256")

    def _read(self) -> tuple[int, str]:
        """Finds all values up to the first that is not whole, or not this user's: where they end, and why what follows
        cannot be used; "" if nothing follows, or it is not whole."""
        end, size = 0, self.file.seek(0, os.SEEK_END)
        self.file.seek(0)
        if self._key is None:
            return 0, "there is no key" if size else ""
        while len(head := self.file.read(HEAD)) == HEAD:
            signature, count = head[:KEY_BYTES], int.from_bytes(head[KEY_BYTES:])
            body = self.file.read(min(count, size))
            if len(body) != count:
                break
            if not hmac.compare_digest(signature, self._signature(body)):
                return end, "it is damaged, or was signed by another key"
            try:
                self.found.append(pickle.loads(body))
            except Exception as error:  # of another version of the program
                return end, f"it cannot be read ({first_line(error)})"
            self._last, end = signature, end + HEAD + count
        return end, ""


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
