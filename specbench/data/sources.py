"""Where the files that a run reads lie, and their versions: hashes, commits of a hub id, the version of Python."""

import hashlib
import os
import platform
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from specbench.settings import file_hash

SHIPPED = Path(__file__).resolve().parents[1] / "shipped"  # the models that come with the package
LOADED = (".py", ".json", ".safetensors", ".bin", ".pt", ".model", ".txt", ".jinja", ".tiktoken")  # of a checkpoint
PACKAGE = "package:"
UNKNOWN = "revision "  # begins the version of a hub id whose commit is not known


def place_of(path: str) -> str:
    """A path as it is; `shipped:NAME` is a file or folder that comes with specbench, `package:NAME/FILE` a file of an
    installed Python package, which is not imported."""
    if path.startswith(PACKAGE):
        name, _, file = path.removeprefix(PACKAGE).partition("/")
        found = find_spec(name) if name.isidentifier() else None
        folders = found and found.submodule_search_locations
        return str(Path(folders[0], file)) if folders else path
    return str(SHIPPED / path.removeprefix("shipped:")) if path.startswith("shipped:") else path


def of_folder(folder: Path) -> str:
    """A hash of the contents of all files in a folder and its sub-folders."""
    return digest_of(f"{path.relative_to(folder)} {file_hash(path)}" for path in folder.rglob("*") if path.is_file())


def of_checkpoint(path: Path, name: str, revision: str | None) -> str:
    """Of a local folder: its files with sizes and times of change. Of a hub id: the commit in the local cache, or the
    revision where there is none."""
    if not path.is_dir():
        return of_hub(name, revision, "model", "config.json")
    if path.is_relative_to(SHIPPED):  # another installation has other times
        return of_folder(path)
    found = [(entry.name, entry.stat()) for entry in os.scandir(path) if entry.name.endswith(LOADED)]
    return digest_of(f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in found)


def of_hub(name: str, revision: str | None, kind: str, file: str) -> str:
    """The commit of a hub id in the local cache, which holds this file of it, or else the revision."""
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(name, file, revision=revision, repo_type=kind)
    except ValueError:  # no hub id
        found = None
    return f"commit {Path(found).parent.name}" if isinstance(found, str) else f"{UNKNOWN}{revision or 'main'}"


def of_tokenizer(tokenizer: Any) -> str:
    """A hash of a tokenizer's rules, or of its vocabulary where there are no rules to be read."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    names = sorted(tokenizer.get_vocab().items()) if backend is None else backend.to_str()
    return hashlib.sha256(repr(names).encode()).hexdigest()


def of_python() -> str:
    """The version of Python, whose standard library is a corpus."""
    return platform.python_version()


def digest_of(lines: Iterable[str]) -> str:
    """A hash of lines, whatever their order."""
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()
