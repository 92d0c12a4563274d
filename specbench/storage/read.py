"""Reads the files of finished runs, for reports and replay."""

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import yaml

from specbench.settings import ConfigError
from specbench.visible import visible


@dataclass
class StoredRun:
    """One run's folder. `keys` are the overrides in which it differs from the other runs."""

    folder: Path
    result: dict[str, Any]
    keys: dict[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """A short name that tells the run from the others."""
        name = ", ".join(f"{key.split('.')[-1]} {value}" for key, value in self.keys.items()) or self.folder.name
        return visible(name)

    @cached_property
    def rounds(self) -> list[dict[str, Any]]:
        """One record per round and prompt, from rounds.parquet."""
        rows: list[dict[str, Any]] = parquet.read_table(self.folder / "rounds.parquet").to_pylist()
        return rows

    @cached_property
    def prompts(self) -> list[dict[str, Any]]:
        """The lines of prompts.jsonl."""
        lines = (self.folder / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]


def load_runs(folder: Path) -> list[StoredRun]:
    """The run in `folder`, or those in its sub-folders. Raises ConfigError if there is none."""
    paths = [folder] if (folder / "results.json").is_file() else sorted(p.parent for p in folder.glob("*/results.json"))
    runs = [StoredRun(path, json.loads((path / "results.json").read_text(encoding="utf-8"))) for path in paths]
    if not runs:
        raise ConfigError(f"{folder} holds no finished run: there is no results.json in it or one folder below")
    overrides = [_overrides(run.folder) for run in runs]
    for run, own in zip(runs, overrides, strict=True):
        run.keys = {key: value for key, value in own.items() if any(other.get(key) != value for other in overrides)}
    return sorted(runs, key=lambda run: [_sortable(value) for value in run.keys.values()])


def _overrides(folder: Path) -> dict[str, str]:
    """{"gamma": "5", ...}: the overrides that Hydra wrote beside the run, or else those in the folder's name."""
    noted = folder / ".hydra" / "overrides.yaml"
    words = yaml.safe_load(noted.read_text(encoding="utf-8")) if noted.is_file() else folder.name.split(",")
    return dict(word.split("=", 1) for word in words if "=" in word)


def _sortable(value: str) -> tuple[int, float, str]:
    try:
        return 0, float(value), ""
    except ValueError:
        return 1, 0.0, value


def read_result(folder: Path) -> dict[str, Any] | None:
    """results.json of a run; None if it is missing or cannot be read."""
    try:
        found: dict[str, Any] = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return None
    return found


def is_finished(folder: Path, digest: str) -> bool:
    """Whether the folder holds a complete result of the configuration with this digest."""
    found = read_result(folder)
    return found is not None and found.get("config_digest") == digest and found.get("status") == "complete"
