"""A file that others publish: where it is to be had, and whether the one at hand is it."""

import functools
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from specbench.data.json_lines import need_file
from specbench.errors import ConfigError, shown
from specbench.settings import BaseSettings, file_hash, setting

log = logging.getLogger(__name__)
SHA256 = re.compile("[0-9a-fA-F]{64}")


@dataclass
class KnownFileSettings(BaseSettings):
    """A local copy of a published file. One with another sha256 is a warning or, with `verify`, refused."""

    path: str | None = setting()
    url: str = setting()
    sha256: str | None = setting()  # None: not known
    verify: bool = setting()

    def check(self, prefix: str) -> None:
        """Raises ConfigError if the file is not there, or with `verify` if it is another one."""
        if not self.url.startswith("https://"):
            raise ConfigError(f"{prefix}url={shown(self.url)} is not allowed: it must be an address, https://...")
        if self.sha256 is not None and not SHA256.fullmatch(self.sha256):
            raise ConfigError(
                f"{prefix}sha256={shown(self.sha256)} is not allowed: it must be 64 hexadecimal digits, or null"
            )
        if self.path is None or not Path(self.path).exists():
            said = f"{prefix}path is not set" if self.path is None else f"{prefix}path={self.path} is not there"
            raise ConfigError(f"{said}: fetch {self.url} and give its place with {prefix}path=FILE")
        need_file(self.path, f"{prefix}path")
        found = file_hash(self.path)
        if self.sha256 is None:
            if self.verify:
                raise ConfigError(f"{prefix}verify=true is not possible: set {prefix}sha256 to the hash that is wanted")
        elif found != self.sha256.lower():
            told = f"{prefix}path={self.path} has the sha256 {found}, and {self.url} had {self.sha256}"
            if self.verify:
                raise ConfigError(f"{told}: fetch it again, or use {prefix}verify=false")
            _warn(f"{told}: numbers may not compare with those of others")

    @property
    def file(self) -> str:
        """The path, which `check` has found."""
        assert self.path is not None
        return self.path

    def sources(self) -> Mapping[str, str]:
        return {"path": file_hash(self.file)}


@functools.cache
def _warn(text: str) -> None:
    """Once in a process: a configuration is checked more than once."""
    log.warning("%s", text)
