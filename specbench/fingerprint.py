"""The identity of what a run depends on: settings, files that it reads, checkpoints, code.

A finished run is used again only if all of them are what they were.
"""

import functools
import hashlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbench.settings import SHIPPED, file_hash

LOADED = (
    ".py",
    ".json",
    ".safetensors",
    ".bin",
    ".pt",
    ".model",
    ".txt",
    ".jinja",
    ".tiktoken",
)  # of a checkpoint's folder
UNKNOWN = "revision "  # begins the version of a hub id whose commit is not known


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
        found = {"sources": self.sources, "code": self.code, "device": self.device}
        return {"config": self.digest, **{name: dict(versions) for name, versions in found.items()}}

    def differs_from(self, stored: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
        """What a stored identity and its configuration have otherwise, in words; empty if they agree."""
        found = []
        if stored.get("config") != self.digest:
            theirs, ours = flat({key: config.get(key) for key in self.settings}), flat(self.settings)
            found = sorted(key for key in {*theirs, *ours} if theirs.get(key) != ours.get(key)) or ["the configuration"]
        for field, what in (("sources", "the contents of {}"), ("code", "the code of {}"), ("device", "the {}")):
            noted, now = stored.get(field), getattr(self, field)
            noted = noted if isinstance(noted, dict) else {}
            found += [what.format(key) for key in sorted({*noted, *now}) if noted.get(key) != now.get(key)]
        return found


class NotedIdentity(Identity):
    """An identity that was noted before the run began, maybe on another machine: which device it is, if none is noted,
    and which commit of a hub id, were not known then."""

    def differs_from(self, stored: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
        known = stored.get("sources")
        known = known if isinstance(known, dict) else {}
        sources = {key: known.get(key, was) if was.startswith(UNKNOWN) else was for key, was in self.sources.items()}
        device = self.device or stored.get("device") or {}
        return Identity(self.digest, self.settings, sources, self.code, device).differs_from(stored, config)


def flat(tree: Any, key: str = "") -> dict[str, str]:
    """{"data": {"limit": 3}} as {"data.limit": "3"}."""
    if not isinstance(tree, Mapping) or not tree:
        return {key: str(tree)}
    return {k: v for name, value in tree.items() for k, v in flat(value, f"{key}.{name}" if key else str(name)).items()}


def of_folder(folder: Path) -> str:
    """A hash of the contents of all files in a folder and its sub-folders."""
    return _digest(f"{path.relative_to(folder)} {file_hash(path)}" for path in folder.rglob("*") if path.is_file())


def of_checkpoint(path: Path, name: str, revision: str | None) -> str:
    """Of a local folder: its files with sizes and times of change. Of a hub id: the commit in the local cache, or the
    revision where there is none."""
    if not path.is_dir():
        return of_hub(name, revision, "model", "config.json")
    if path.is_relative_to(SHIPPED):  # another installation has other times
        return of_folder(path)
    found = [(entry.name, entry.stat()) for entry in os.scandir(path) if entry.name.endswith(LOADED)]
    return _digest(f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in found)


def of_hub(name: str, revision: str | None, kind: str, file: str) -> str:
    """The commit of a hub id in the local cache, which holds this file of it, or else the revision."""
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(name, file, revision=revision, repo_type=kind)
    except ValueError:  # no hub id
        found = None
    return f"commit {Path(found).parent.name}" if isinstance(found, str) else f"{UNKNOWN}{revision or 'main'}"


def of_python() -> str:
    """The version of Python, whose standard library is a corpus."""
    return platform.python_version()


def of_libraries() -> dict[str, str]:
    """Versions of the libraries that texts and times depend on."""
    return {name: importlib.metadata.version(name) for name in ("torch", "transformers")}


@functools.cache
def of_code() -> str:
    """A hash of the package's source files, which a wheel and a changed checkout have too."""
    package = Path(__file__).parent
    return _digest(f"{path.relative_to(package)} {file_hash(path)}" for path in package.rglob("*.py"))


def of_module(name: str) -> str:
    """A hash of an imported module's file."""
    file = getattr(sys.modules.get(name), "__file__", None)
    return file_hash(file) if file else "unknown"


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()
