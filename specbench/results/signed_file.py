"""A file that grows by values of any class, and is read by this user's programs alone.

A pickle can run code, so each is signed, with all that stands before it, by a key that only this user can read. What
another one has put there, and what was not written to its end, is not read.
"""

import hmac
import os
import pickle
import secrets
import stat
from pathlib import Path
from typing import Any

from specbench.executors.machine import cache_dir
from specbench.results.atomic_files import PartFile, open_no_link

KEY_BYTES, SIZE_BYTES = 32, 8
HEAD = KEY_BYTES + SIZE_BYTES  # a signature and the number of the bytes that follow


class SignedFile(PartFile):
    """Values of earlier processes, `found`, behind which this one appends its own."""

    def __init__(self, path: Path):
        """Raises ConfigError if the file cannot be opened."""
        super().__init__(path, "a+")
        self._key, self._last = own_key(), b""
        self.found = self._read()

    def clear(self) -> None:
        """Removes all values."""
        self._last, self.found = b"", []
        self.cut(0)

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

    def _read(self) -> list[Any]:
        """All values up to the first that is not whole, or not this user's; what stands from there on is removed."""
        found, end, size = [], 0, self.file.seek(0, os.SEEK_END)
        self.file.seek(0)
        while self._key is not None and len(head := self.file.read(HEAD)) == HEAD:
            signature, count = head[:KEY_BYTES], int.from_bytes(head[KEY_BYTES:])
            body = self.file.read(min(count, size))
            if len(body) != count or not hmac.compare_digest(signature, self._signature(body)):
                break
            try:
                found.append(pickle.loads(body))
            except Exception:  # of another version of the program
                break
            self._last, end = signature, end + HEAD + count
        self.cut(end)
        return found


def own_key() -> bytes | None:
    """A key that lies in the user's cache folder, made at the first time; None if there can be none."""
    path = cache_dir() / "key"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        if not path.exists():
            with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags | os.O_EXCL, 0o600)) as file:
                file.write(secrets.token_bytes(KEY_BYTES))
            try:
                os.link(temporary, path)  # of two processes the first one's
            except FileExistsError:
                pass
            finally:
                temporary.unlink()
        with open(path, "rb", opener=open_no_link) as file:
            about, key = os.fstat(file.fileno()), file.read()
        private = about.st_uid == os.getuid() and not about.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
        return key if private and len(key) == KEY_BYTES else None
    except OSError:
        return None
