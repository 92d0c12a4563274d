"""Nothing beside the files of the run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specbench.results import RunResult
from specbench.run import Batch


class NoLogger:
    """`logger=none`."""

    @dataclass
    class Settings:
        pass

    def __init__(self, settings: Settings):
        pass

    def log(self, result: RunResult, batches: Sequence[Batch], out_dir: Path) -> None:
        pass
