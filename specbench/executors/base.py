"""Base class of executors: how functions of tensors run (as written, compiled, or as CUDA graphs)."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from specbench.decoding.timer import Stage
from specbench.settings import Component

Module = TypeVar("Module", bound=nn.Module)


class HasCache(Protocol):
    """A model as executors see it: functions of it read its weights, and read and write its cache."""

    name: str

    @property
    def module(self) -> nn.Module: ...

    @property
    def weight_bytes(self) -> int: ...

    def cache_tensors(self) -> list[Tensor]:
        """The cache's tensors, in a fixed order and in the backend's own shapes; empty before the first forward."""

    def on_cache(self, tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Inside this context the cache uses these tensors, as `cache_tensors` has them, instead of its own."""


class Executor(Component):
    """Runs everything in PyTorch's eager mode; subclasses override what they run faster."""

    fixed_shapes = False  # whether drafts are padded to one width, so that few shapes occur
    needs_cuda = False
    traces = False  # whether functions are compiled, which kernels of whole layers are no part of
    captures_graphs = False  # whether calls keep memory of their own, for the estimate before a run
    runs_encoders = True  # whether it can run encoder-decoders
    runs_recurrent = True  # whether it can run models with a recurrent state
    warm = False  # whether warm-up is over, in which all usual shapes are met
    whole_rounds = False  # whether a round is best one call
    marks: Sequence[tuple[Stage, Any]] = ()  # stages that ended inside the last captured call, with CUDA's events

    @classmethod
    def from_settings(cls, settings: Any, device: torch.device, run: Any) -> "Executor":
        """Builds the executor for a device and the run's other choices. Raises ConfigError if it cannot run there."""
        return cls(**vars(settings))

    def load(self, module: Module) -> Module:
        """Returns the module to run in place of a loaded one, which stays as it is."""
        return module

    def compiled(self, function: Callable[..., Any], *models: HasCache) -> Callable[..., Any]:
        """Returns a compiled or captured version of a function of tensors, which changes the caches of `models`."""
        return function

    def mark(self, stage: Stage) -> None:
        """Called by a function that is several stages of a round, at the end of each but the last."""

    def compiled_whole(self, function: Callable[..., Any], model: HasCache, usual: bool = True) -> Callable[..., Any]:
        """As `compiled`, for a function that calls such versions, `usual` if this call has the shapes of most calls."""
        return self.compiled(function, model)

    def columns(self, needed: int, capacity: int | None = None) -> int:
        """Number of cache columns to allocate for `needed` ones or, given the cache's `capacity`, to attend to."""
        return needed

    def lengths(self, columns: int) -> list[int]:
        """Text lengths, in tokens, to warm up: one per shape bucket up to `columns`; empty without buckets."""
        return []

    def run_eagerly(self, why: str) -> None:
        """From now on functions run as they are: called before models are loaded that cannot be captured."""

    def notes(self) -> list[str]:
        """What a reader of the run's times must know, in sentences."""
        return []
