"""The context from which models and drafters are built, besides their own settings: device and dtype among others."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specbench.cache.slots import SlotCache
from specbench.data.prompts import Prompt
from specbench.decoding.sampling import Sampling
from specbench.errors import ConfigError
from specbench.executors.base import Executor


@dataclass(frozen=True)
class Context:
    """How models run, and the scalars that they and drafters need."""

    device: torch.device
    dtype: torch.dtype
    sampling: Sampling  # of the logits of the model that is being built
    new_cache: Callable[[int, int], SlotCache]  # makes a cache of so many rows and columns
    executor: Executor
    seed: int = 0
    gamma: int = 0  # the largest gamma of any round
    attention: str = "auto"  # or sdpa, or triton
    stop_strings: Sequence[str] = ()
    prompts: Sequence[Prompt] = ()  # of the run, in their order


def pick_device(name: str) -> torch.device:
    """The device that the setting names: auto, cpu, cuda or cuda:N. A CUDA device becomes the current one, on which
    streams, events and graphs are made. Raises ConfigError if there is no such device."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device={name} is not here: {torch.cuda.device_count()} CUDA devices are visible, use cpu")
    torch.cuda.set_device(device.index or 0)
    products: Any = torch.backends.cuda.matmul  # split sums of products stay in float32
    products.allow_bf16_reduced_precision_reduction = products.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew, for 20 to 40 ms, at every new length of a text
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype that the setting names; `auto` is float32 on a CPU, where 16 bits gain nothing, bfloat16 on CUDA."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
