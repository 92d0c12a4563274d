"""The logger `none`, for runs that leave only their files."""

from pathlib import Path
from typing import TYPE_CHECKING

from specbench.loggers.logger import Logger

if TYPE_CHECKING:
    from specbench.decoded import Record
    from specbench.results import RunResult


class NoLogger(Logger):
    """Mirrors nothing."""

    def log(self, result: "RunResult", record: "Record", out_dir: Path) -> None:
        """Does nothing."""
