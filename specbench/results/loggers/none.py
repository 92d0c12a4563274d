"""The logger `none`, for runs that leave only their files."""

from pathlib import Path
from typing import TYPE_CHECKING

from specbench.results.loggers.base import Logger

if TYPE_CHECKING:
    from specbench.results.schema import RunResult
    from specbench.stats.records import RunRecord


class NoLogger(Logger):
    """Mirrors nothing."""

    def log(self, result: "RunResult", record: "RunRecord", out_dir: Path) -> None:
        """Does nothing."""
