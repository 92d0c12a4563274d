"""What follows a run: `Logger`, the option `none`, leaves only its files; Weights & Biases has a module of its own."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbench.measure.record import Record
from specbench.report.files import Run
from specbench.settings import Component


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
