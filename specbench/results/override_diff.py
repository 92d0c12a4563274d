"""The keys in which runs differ: what tells one run of several from the others."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from specbench.errors import first_line

log = logging.getLogger(__name__)


def differing_overrides(runs: Sequence[tuple[Path, Mapping[str, Any]]]) -> list[dict[str, str]]:
    """Of each run (its folder and results) the keys that have not the same value in all, as {"gamma": "5"}. A run
    without an override that others have has the value of its configuration: without gamma=4 it has the same gamma as
    one with it. Numbers are written alike, and all runs have the same order."""
    overrides = [_overrides(folder, result) for folder, result in runs]
    names = dict.fromkeys(key for own in overrides for key in own)
    every = []
    for (_, result), own in zip(runs, overrides, strict=True):
        values = {key: own[key] if key in own else _configured(result, key) for key in names}
        every.append({key: alike(value) for key, value in values.items() if value is not None})
    return [{key: value for key, value in own.items() if any(other.get(key) != value for other in every)}
            for own in every]  # fmt: skip


def sortable(value: str) -> tuple[int, float, str]:
    """What a value is sorted by: numbers first, by size."""
    try:
        return 0, float(value), ""
    except ValueError:
        return 1, 0.0, value


def _configured(result: Mapping[str, Any], key: str) -> str | None:
    """The value of a key in a run's configuration as an override has it; None if it is not there, or no scalar."""
    if key in result["choices"]:
        return str(result["choices"][key])
    value: Any = result["config"]
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            return None
        value = value[part]
    if isinstance(value, dict | list):
        return None
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def alike(value: str) -> str:
    """1.0 and 1 as the same text."""
    try:
        return f"{float(value):g}" if float(value) == float(f"{float(value):g}") else value
    except ValueError:
        return value


def _overrides(folder: Path, result: Mapping[str, Any]) -> dict[str, str]:
    """{"gamma": "5", ...}: the overrides that results.json or Hydra noted, or else those in the folder's name."""
    noted = folder / ".hydra" / "overrides.yaml"
    words = result.get("overrides")
    if words is None and noted.is_file():
        try:
            words = yaml.safe_load(noted.read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError, ValueError) as error:
            log.warning("%s cannot be read (%s)", noted, first_line(error))
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        words = folder.name.split(",")
    return dict(word.split("=", 1) for word in words if "=" in word)
