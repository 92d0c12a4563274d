"""`logger=none`: nothing beside the files of the run."""

from pathlib import Path

from specbench.decoded import Record
from specbench.loggers.logger import Logger
from specbench.results import RunResult


class NoLogger(Logger):
    """Mirrors nothing."""

    def log(self, result: RunResult, record: Record, out_dir: Path) -> None:
        """The files are there already."""
