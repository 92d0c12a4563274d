"""What a run leaves: results.json, rounds.parquet, page.html, how they are read again, and what else follows it."""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from specbench.errors import ConfigError
from specbench.measure.record import Record, content, read
from specbench.settings import Component

log = logging.getLogger(__name__)
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
    from specbench.measure import schema  # which a new run does not need

    return Run(folder, schema.parsed(content(folder / RESULTS), schema.RESULTS, str(folder / RESULTS)), folder.name)


def read_comparison(folder: Path) -> list[dict[str, Any]]:
    """The rows of a comparison. Raises ConfigError if comparison.json is not one."""
    from specbench.measure import schema

    path = folder / COMPARISON
    found: list[dict[str, Any]] = schema.parsed(content(path), schema.COMPARISON, str(path))["rows"]
    return found


def read_all(folder: Path) -> list[Run]:
    """All finished runs below a folder, none inside another, each with a label that says in what it differs; those that
    cannot be read are named in the log. Raises ConfigError if none is left."""
    every = {path.parent for path in folder.rglob(RESULTS)}
    paths = sorted(path for path in every if not every.intersection(path.parents))  # processes of a run are part of it
    runs = []
    for path in paths:
        try:
            runs.append(read_run(path))
        except ConfigError as error:
            log.warning("left out: %s", error)
    if not runs:
        raise ConfigError(f"{folder} has no finished run: no {RESULTS} that can be read is in it or below it")
    labels = labels_of([run.results["details"]["overrides"] for run in runs])
    if len({*labels}) < len(labels):  # then their places differ
        labels = [str(run.folder.relative_to(folder)) for run in runs]
    return [replace(run, label=label) for run, label in zip(runs, labels, strict=True)]


def labels_of(overrides: Sequence[Sequence[str]]) -> list[str]:
    """A short name for each run: the overrides in which runs differ; of one key only its values, if not numbers."""
    common = set.intersection(*map(set, overrides)) if len(overrides) > 1 else set()
    own = [[word for word in words if word not in common] for words in overrides]
    keys = {word.partition("=")[0] for words in own for word in words}
    if len(keys) == 1 and all(len(words) == 1 for words in own):
        values = [words[0].partition("=")[2] for words in own]
        if not any(value[:1] in "-+.0123456789" for value in values):
            return values
    return [", ".join(words) or "default" for words in own]


@dataclass(frozen=True)
class Opening:
    """What is known of a run before it decodes."""

    name: str
    folder: Path
    config: Mapping[str, Any]  # every setting, resolved
    choices: Mapping[str, str]  # the option that was chosen in each group
    kind: str = "run"  # or "job" of a sweep, "method" of a comparison, "repeats"


class Logger(Component):
    """Leaves only the run's files. Other loggers follow a run and never hold the only copy of anything: an error in
    `open` stops the run before it decodes, one in any other method loses no results."""

    def open(self, opening: Opening) -> None:
        """Called before decoding begins."""

    def progress(self, record: Record) -> None:
        """Called with the record of each request, when its line is written."""

    def finish(self, run: Run) -> None:
        """Called when all files are written."""

    def abandon(self, status: str) -> None:
        """Called instead of `finish` if the run ends without results: "interrupted" or "failed"."""
