"""The identity of what a run depends on: settings, files that it reads, checkpoints, code.

A finished run is used again only if all of them are what they were.
"""

import functools
import importlib.metadata
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbench.data.sources import digest_of
from specbench.settings import file_hash


@dataclass(frozen=True)
class Identity:
    """What a run was made of. `settings` are those that numbers depend on; `sources` are versions of what they name
    ({"data.path": "sha256 ..."}), `code` versions of the programs, and `device` what they run on."""

    digest: str
    settings: Mapping[str, Any]
    sources: Mapping[str, str]
    code: Mapping[str, str]
    device: Mapping[str, str]

    def as_dict(self) -> dict[str, Any]:
        """The field `identity` of results.json; the settings stand in its field `config`."""
        return {"config": self.digest, "sources": dict(self.sources), "code": dict(self.code),
                "device": dict(self.device)}  # fmt: skip

    def differs_from(self, stored: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
        """What a stored identity and its configuration have otherwise, in words; empty if they agree."""
        found = []
        if stored.get("config") != self.digest:
            theirs, ours = _flat({key: config.get(key) for key in self.settings}), _flat(self.settings)
            found = sorted({key for key, _ in theirs.items() ^ ours.items()}) or ["the configuration"]
        for field, what in (("sources", "the contents of {}"), ("code", "the code of {}"), ("device", "the {}")):
            noted, now = stored.get(field) or {}, getattr(self, field)
            found += [what.format(key) for key in sorted({*noted, *now}) if noted.get(key) != now.get(key)]
        return found


def _flat(tree: Any, key: str = "") -> dict[str, str]:
    """{"data": {"limit": 3}} as {"data.limit": "3"}."""
    if not isinstance(tree, Mapping) or not tree:
        return {key: str(tree)}
    below = (_flat(value, f"{key}.{name}".removeprefix(".")) for name, value in tree.items())
    return {name: text for own in below for name, text in own.items()}


def of_libraries() -> dict[str, str]:
    """Versions of the libraries that texts and times depend on."""
    return {name: importlib.metadata.version(name) for name in ("torch", "transformers")}


@functools.cache
def of_code() -> str:
    """A hash of the package's source files, which a wheel and a changed checkout have too."""
    package = Path(__file__).parents[1]
    sources = (path for ending in ("py", "cpp") for path in package.rglob(f"*.{ending}"))
    return digest_of(f"{path.relative_to(package)} {file_hash(path)}" for path in sources)


def of_module(name: str) -> str:
    """A hash of an imported module's file."""
    file = getattr(sys.modules.get(name), "__file__", None)
    return file_hash(file) if file else "unknown"
