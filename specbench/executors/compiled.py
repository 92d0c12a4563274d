"""Leaf functions compiled by TorchInductor, one program per set of shapes, kept on disk.

A leaf is traced once with `torch.export` and compiled ahead of its first call, so a call checks no guards and runs no
Python of the model. The whole draft of a small drafter is one leaf. Attention sees a bucket of the cache's columns, and
drafts are padded to one width, so that few shapes occur. A second process, and `executor=auto`, take the programs from
the disk without tracing or compiling.
"""

from dataclasses import dataclass
from typing import Any

from specbench.component import Selections
from specbench.executors.auto import AutoExecutor
from specbench.executors.shape_buckets import refuse_growing_cache
from specbench.settings import setting


class CompiledExecutor(AutoExecutor):
    """Compiles the programs that are not there yet, and always runs them."""

    compiles = True
    runs_recurrent = False
    runs_divided = False

    @dataclass
    class Settings(AutoExecutor.Settings):
        compile: str = setting(choices=("true",), default="true")

    @classmethod
    def refuses(cls, settings: Any, run: Selections) -> str | None:
        return refuse_growing_cache(run)
