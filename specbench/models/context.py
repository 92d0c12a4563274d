"""The context from which models and drafters are built, besides their own settings."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from specbench.cache.slots import SlotCache
from specbench.data.prompts import Prompt
from specbench.decoding.sampling import Sampling
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
