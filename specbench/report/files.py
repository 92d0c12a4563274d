"""The files of a finished run: results.json, rounds.parquet, page.html; and how they are read again."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from specbench.errors import ConfigError, shown
from specbench.measure.record import SCHEMA_VERSION, Record, read

RESULTS, RECORDS, ROUNDS, PAGE = "results.json", "prompts.jsonl", "rounds.parquet", "page.html"
CONFIG = "config.yaml"
COMPARISON = "comparison.json"  # of several methods on the same prompts


@dataclass(frozen=True)
class Run:
    """A finished run: its folder and what results.json holds."""

    folder: Path
    results: dict[str, Any]
    label: str = field(default="")

    @cached_property
    def records(self) -> list[Record]:
        """The record of every request."""
        return read(self.folder / RECORDS)


def write_text(path: Path, text: str) -> None:
    """Writes a file as a whole: a kill leaves the one that was there before."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def read_run(folder: Path) -> Run:
    """A finished run. Raises ConfigError if results.json is not there or not one."""
    return Run(folder, read_json(folder / RESULTS), folder.name)


def read_json(path: Path) -> dict[str, Any]:
    """What results.json or comparison.json holds. Raises ConfigError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path} is not there: choose the folder of a finished run") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error})") from error
    version = found.get("schema_version") if isinstance(found, dict) else None
    if version != SCHEMA_VERSION:
        raise ConfigError(
            f"{path} was not written by this version of specbench: its schema_version is {shown(version)}, not "
            f"{SCHEMA_VERSION}"
        )
    return dict(found)


def read_all(folder: Path) -> list[Run]:
    """All finished runs in a folder and below it, none inside another one, each with a label that says in what it
    differs from the others. Raises ConfigError if there are none."""
    every = {path.parent for path in folder.rglob(RESULTS)}
    paths = sorted(path for path in every if not every.intersection(path.parents))  # processes of a run are part of it
    if not paths:
        raise ConfigError(f"{folder} has no finished run: no {RESULTS} is in it or below it")
    return labelled([read_run(path) for path in paths], [str(path.relative_to(folder)) for path in paths])


def labelled(runs: Sequence[Run], places: Sequence[str]) -> list[Run]:
    """The runs with labels that say in what they differ, or with their places where that leaves two alike."""
    labels = labels_of([run.results["details"]["overrides"] for run in runs])
    if len({*labels}) < len(labels):
        labels = [*places]
    return [replace(run, label=label) for run, label in zip(runs, labels, strict=True)]


def labels_of(overrides: Sequence[Sequence[str]]) -> list[str]:
    """A short name for each run: the overrides in which the runs differ; of one key alone only its values, unless they
    are numbers."""
    common = set.intersection(*map(set, overrides)) if len(overrides) > 1 else set()
    own = [[word for word in words if word not in common] for words in overrides]
    keys = {word.partition("=")[0] for words in own for word in words}
    if len(keys) == 1 and all(len(words) == 1 for words in own):
        values = [words[0].partition("=")[2] for words in own]
        if not any(value[:1] in "-+.0123456789" for value in values):
            return values
    return [", ".join(words) or "default" for words in own]
