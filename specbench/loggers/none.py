"""Nothing beside the files of the run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specbench.batch import Batch
from specbench.results import RunResult


class NoLogger:
    """`logger=none`."""

    @dataclass
    class Settings:
        pass

    def __init__(self, settings: Settings):
        pass

    def log(self, result: RunResult, batches: Sequence[Batch], out_dir: Path) -> None:
        pass
