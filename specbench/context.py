"""What every component is built from, besides its own settings: `Component(settings, context)`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from specbench.decoding.sampling import Sampling

if TYPE_CHECKING:
    from specbench.cache.slots import SlotCache
    from specbench.executors.eager import EagerExecutor
    from specbench.models.language_model import LanguageModel


@dataclass
class Context:
    """The run's scalars, and the parts that are already built when later ones need them."""

    device: torch.device
    dtype: torch.dtype
    sampling: Sampling
    lenience: float = 1.0
    seed: int = 0
    gamma: int = 0
    new_cache: Callable[[int, int], SlotCache] | None = None
    executor: EagerExecutor | None = None
    target: LanguageModel | None = None
    drafter: LanguageModel | None = None
