"""executor=auto: CUDA graphs on CUDA where they are possible, else eager mode."""

from typing import Any

import torch

from specbench.executors.base import Executor
from specbench.executors.cudagraph import CudaGraphExecutor
from specbench.executors.eager import EagerExecutor


class DefaultExecutor(EagerExecutor):
    """Stands for the executor that the device decides."""

    @classmethod
    def from_settings(cls, settings: Any, device: torch.device, run: Any) -> Executor:
        possible = run["cache"].kind.fixed_shapes and run["decoding"].kind.samples
        if device.type == "cuda" and possible and not run["target"].settings.divided():
            return CudaGraphExecutor()
        return EagerExecutor(settings.half_weights)
