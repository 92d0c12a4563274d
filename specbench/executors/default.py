"""The executor of executor=auto."""

from typing import Any

import torch

from specbench.executors.base import Executor
from specbench.executors.eager import EagerExecutor


class DefaultExecutor(EagerExecutor):
    """executor=auto: CUDA graphs on CUDA where they are possible, else eager mode."""

    @classmethod
    def from_settings(cls, settings: Any, device: torch.device, run: Any) -> Executor:
        possible = run["cache"].kind.fixed_shapes and run["decoding"].kind.samples
        if device.type == "cuda" and possible and not run["target"].settings.divided():
            from specbench.executors.cudagraph import CudaGraphExecutor

            return CudaGraphExecutor()
        return EagerExecutor(settings.half_weights)
