"""The reference executor, which runs every operation as it is written, and the executor of executor=auto."""

from typing import Any

import torch

from specbench.executors.base import Executor, Module
from specbench.executors.half_linear import with_half_weights
from specbench.settings import BaseSettings


class EagerExecutor(Executor):
    """PyTorch's eager mode. On a CPU linear layers read the weights of a checkpoint in 16 bits as they are."""

    class Settings(BaseSettings):
        half_weights: bool = True

    def __init__(self, half_weights: bool = True):
        self.half_weights = half_weights

    def load(self, module: Module) -> Module:
        return with_half_weights(module) if self.half_weights else module


class DefaultExecutor(EagerExecutor):
    """executor=auto: CUDA graphs on CUDA where they are possible, else eager mode."""

    @classmethod
    def from_settings(cls, settings: Any, device: torch.device, run: Any) -> Executor:
        possible = run["cache"].kind.fixed_shapes and run["decoding"].kind.samples
        if device.type == "cuda" and possible:
            from specbench.executors.cudagraph import CudaGraphExecutor

            return CudaGraphExecutor()
        return EagerExecutor(settings.half_weights)
