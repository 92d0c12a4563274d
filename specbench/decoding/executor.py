"""How a forward runs: the seam between the decoder and whatever makes it fast."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from specbench.component import Component

Module = TypeVar("Module", bound=nn.Module)


class HasCache(Protocol):
    """What a leaf of a model reads and writes besides its arguments."""

    @property
    def module(self) -> nn.Module: ...

    @property
    def weight_bytes(self) -> int: ...

    def cache_tensors(self) -> list[Tensor]:
        """The cache's tensors in a fixed order; empty before the first forward."""

    def on_cache(self, tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Runs on other tensors for a while: those that a compiler traces."""


class Executor(Component):
    """PyTorch's eager mode. Subclasses override what they do faster."""

    fixed_shapes = False  # whether drafts are padded to one width, so that few shapes occur
    changes_modules = False  # whether `load` may change the modules that it is given

    @classmethod
    def from_settings(cls, settings: Any, device: torch.device) -> "Executor":
        """Raises ConfigError where it cannot run on this device."""
        return cls()

    def load(self, module: Module) -> Module:
        """The module that is run in place of a loaded one."""
        return module

    def weights(self, module: nn.Module) -> list[Tensor]:
        """The weights of a module that `load` returned, each once."""
        return list(module.parameters())

    def leaf(self, function: Callable[..., Any], model: HasCache | None = None) -> Callable[..., Any]:
        """A faster form of a function of tensors. `model` is the model whose cache it changes."""
        return function

    def phase(
        self, function: Callable[..., Any], model: HasCache | None = None, usual: bool = True
    ) -> Callable[..., Any]:
        """Likewise for a function that calls leaves; `usual` if its shapes are those of most calls."""
        return function

    def columns(self, needed: int, capacity: int | None = None) -> int:
        """How many cache columns to allocate, or (at most `capacity`) to attend to."""
        return needed

    def lengths(self, columns: int) -> list[int]:
        """Text lengths to warm up, one per shape bucket up to `columns`; empty if there are no buckets."""
        return []

    def doubles(self, weights: int, tied: int, device: torch.device, dtype: torch.dtype) -> int:
        """Bytes of a model's weights that will exist twice, of `weights` in all and `tied` in a head that
        shares the embedding."""
        return 0

    def bytes(self) -> int:
        """Memory that the executor itself holds: packed weights, graph pools."""
        return 0
