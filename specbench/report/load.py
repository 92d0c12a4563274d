"""Finished runs, as they lie on the disk: what reports are made from."""

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet

from specbench.settings import ConfigError


@dataclass
class StoredRun:
    """One run's folder. `keys` are the overrides in which it differs from the others."""

    folder: Path
    result: dict[str, Any]
    keys: dict[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return ", ".join(f"{key.split('.')[-1]} {value}" for key, value in self.keys.items()) or self.folder.name

    @cached_property
    def rounds(self) -> list[dict[str, Any]]:
        return parquet.read_table(self.folder / "rounds.parquet").to_pylist()

    @cached_property
    def prompts(self) -> list[dict[str, Any]]:
        lines = (self.folder / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]


def load_runs(folder: Path) -> list[StoredRun]:
    """The run in `folder`, or those in its sub-folders. Raises ConfigError if there is none."""
    paths = [folder] if (folder / "results.json").is_file() else sorted(p.parent for p in folder.glob("*/results.json"))
    runs = [StoredRun(path, json.loads((path / "results.json").read_text(encoding="utf-8"))) for path in paths]
    if not runs:
        raise ConfigError(f"{folder} holds no finished run: there is no results.json in it or one folder below")
    overrides = [_overrides(run.folder.name) for run in runs]
    for run, own in zip(runs, overrides, strict=True):
        run.keys = {key: value for key, value in own.items() if any(other.get(key) != value for other in overrides)}
    return sorted(runs, key=lambda run: [_sortable(value) for value in run.keys.values()])


def _overrides(name: str) -> dict[str, str]:
    """{"gamma": "5", ...} from a folder that is named by its overrides, gamma=5,temperature=0."""
    found, key = {}, None
    for part in name.split(","):
        if "=" in part:
            key, value = part.split("=", 1)
            found[key] = value
        elif key is not None:  # a value with a comma of its own
            found[key] += f",{part}"
    return found


def _sortable(value: str) -> tuple[int, float, str]:
    try:
        return 0, float(value), ""
    except ValueError:
        return 1, 0.0, value
