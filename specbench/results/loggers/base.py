"""Base class of loggers: they follow a run and mirror its files, and never hold the only copy."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.decoding.component import Component

if TYPE_CHECKING:
    from specbench.results.schema import RunResult
    from specbench.stats.records import Group, RunRecord


@dataclass(frozen=True)
class Opening:
    """What is known of a run before it decodes."""

    name: str
    config: Mapping[str, Any]  # every setting, resolved
    choices: Mapping[str, str]  # the option that was chosen in each group
    out_dir: Path
    kind: str = "run"  # or "job" of a sweep, "way" of a comparison, of which several are open at once, or "repeats"
    overrides: Sequence[str] = ()


class Logger(Component, ABC):
    """Told of a run as it goes on. Only `log` has to be written; the other methods do nothing by default. An error in
    `open` stops the run before it decodes; one in any other method never loses results."""

    @classmethod
    def from_settings(cls, settings: Any) -> "Logger":
        """Builds the logger; by default the settings are the constructor's arguments."""
        return cls(**vars(settings))

    def open(self, opening: Opening) -> None:
        """Called before decoding begins."""

    def progress(self, group: "Group") -> None:
        """Called when a group of prompts is decoded in all ways and written, outside of everything that is timed."""

    @abstractmethod
    def log(self, result: "RunResult", record: "RunRecord", out_dir: Path) -> None:
        """Mirrors a run, whose files are in `out_dir`. Called once, after all of them were written."""

    def abandon(self, status: str) -> None:
        """Called instead of `log` if the run ends without results; `status` is "interrupted" or "failed"."""

    def log_sweep(self, name: str, rows: Sequence[Mapping[str, Any]], folder: Path) -> None:
        """Mirrors a sweep that is over: the rows of its summary.csv, one for each job."""

    def log_repeats(self, opening: Opening, result: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
        """Mirrors repeats=R, whose processes have been mirrored one by one: what results.json holds of all of them, and
        the rows of repeats.csv, one for each process."""


class NoLogger(Logger):
    """The logger `none`, for runs that leave only their files."""

    def log(self, result: "RunResult", record: "RunRecord", out_dir: Path) -> None:
        """Does nothing."""
