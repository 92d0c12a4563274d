"""Base class of loggers: they mirror the files of a finished run, and never hold the only copy."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from specbench.component import Component
from specbench.decoded import Record
from specbench.results import RunResult


class Logger(Component, ABC):
    """Called once, after every file of a run has been written."""

    @classmethod
    def from_settings(cls, settings: Any) -> "Logger":
        """Builds the logger; by default the settings are the constructor's arguments."""
        return cls(**vars(settings))

    @abstractmethod
    def log(self, result: RunResult, record: Record, out_dir: Path) -> None:
        """Mirrors a run, whose files are in `out_dir`."""
