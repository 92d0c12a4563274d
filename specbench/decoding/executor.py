"""Base class of executors: how a forward pass runs (with which products, compiled, or as a CUDA graph)."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from specbench.decoding import processes
from specbench.decoding.component import Component

Module = TypeVar("Module", bound=nn.Module)


@dataclass(frozen=True)
class Stored:
    """The weights of a module as an executor stores them."""

    numbers: int  # each weight once
    read: int  # bytes that a forward of one token would read of all of them
    held: int  # bytes, with second copies


@dataclass(frozen=True)
class Work:
    """What a run has before it, for an executor that decides whether to compile for it."""

    seconds: float  # of all its decoding as it is without programs, that of other decoders left out
    least: float  # of them, what reading the weights takes: no program saves that
    weights: int  # of the models, one counted once for each program that reads it


class HasCache(Protocol):
    """A model as executors see it: functions of it read its weights, and read and write its cache."""

    @property
    def module(self) -> nn.Module: ...

    @property
    def weight_bytes(self) -> int: ...

    @property
    def description(self) -> tuple[Any, ...]:
        """What its functions depend on, besides tensors and the run's settings."""

    def cache_tensors(self) -> list[Tensor]:
        """The cache's tensors, in a fixed order and in the backend's own shapes; empty before the first forward."""

    def on_cache(self, tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Inside this context the cache uses these tensors, with the order and shapes of `cache_tensors`, instead of
        its own; a compiler traces with them."""


class Executor(Component):
    """Runs everything in PyTorch's eager mode; subclasses override what they run faster."""

    fixed_shapes = False  # whether drafts are padded to one width, so that few shapes occur
    captures_graphs = False  # whether calls keep memory of their own, for the estimate before a run
    compiles = False  # whether programs that are missing are made
    changes_modules = False  # whether `load` may change the module in place
    runs_encoders = True  # whether it can run encoder-decoders
    runs_recurrent = True  # whether it can run models with a recurrent state
    runs_divided = False  # whether it can run models whose weights are divided among processes or devices
    on_launch: Callable[[], None] | None = None  # the clock's, while a decoder is timed

    @classmethod
    def from_settings(cls, settings: Any, device: torch.device, run: Any, identity: str) -> "Executor":
        """Builds the executor for a device and the run's other choices. `identity` is a hash of all that compiled code
        may depend on, besides shapes. Raises ConfigError if it cannot run there."""
        return cls()

    def load(self, module: Module, exact: bool = True) -> Module:
        """Returns the module to run in place of a freshly loaded one: the same object or another. Unless `exact`, as
        for a quantised drafter, its results may differ from the module's by more than the rounding of its dtype."""
        return module

    def loaded(self) -> Any:
        """What it keeps of the modules that it has loaded so far, for `share`."""

    def share(self, loaded: Any) -> None:
        """Called when this executor runs a module that another one, of the same kind and settings, has loaded; `loaded`
        is what that one's `loaded` said then."""

    def stored(self, module: nn.Module) -> Stored:
        """The weights of a module that `load` returned; bytes are those that this process holds."""
        sizes = [(weight.numel(), processes.current.local_shard(weight).nbytes) for weight in module.parameters()]
        numbers, held = sum(n for n, _ in sizes), sum(b for _, b in sizes)
        return Stored(numbers, held, held)

    def leaf(self, function: Callable[..., Any], model: HasCache | None = None) -> Callable[..., Any]:
        """Returns a faster version of a function of tensors. `model` is the model whose cache it changes."""
        return function

    def phase(
        self, function: Callable[..., Any], model: HasCache | None = None, usual: bool = True
    ) -> Callable[..., Any]:
        """As `leaf`, for a function that itself calls leaves. `usual` says whether this call has the shapes of most
        calls."""
        return function

    @contextmanager
    def timed(self, launch: Callable[[], None]) -> Iterator[None]:
        """Inside this context `launch` is called by `launching`."""
        before, self.on_launch = self.on_launch, launch
        try:
            yield
        finally:
            self.on_launch = before

    def launching(self) -> None:
        """Called by executors that prepare a phase and then give it to the device in one piece, between the two."""
        if self.on_launch is not None:
            self.on_launch()

    def runs_ahead(self, decoder: str, obstacle: str | None) -> bool:
        """Whether a round of this decoder, "plain" or "speculative", may be launched before the host has read the one
        before; `obstacle` says why not, if something else than the executor is in the way."""
        return False

    def columns(self, needed: int, capacity: int | None = None) -> int:
        """Number of cache columns to allocate for `needed` ones or, given the cache's `capacity`, to attend to."""
        return needed

    def lengths(self, columns: int) -> list[int]:
        """Text lengths, in tokens, to warm up: one per shape bucket up to `columns`; empty without buckets."""
        return []

    def prepare(self) -> None:
        """Called before each warm-up."""

    def ready(self) -> None:
        """Called after each warm-up, when all usual shapes have been met."""

    def compile_seconds(self, weights: int) -> float | None:
        """About how long it would take to make the programs that a run lacks after its warm-up, with `weights` as in
        `Work`; None if that is not for `decide` to decide."""
        return None

    def decide(self, work: Work) -> bool:
        """Whether the programs that a run lacks are made for this work; if so, the run is warmed up once more."""
        return False

    def without_programs(self) -> None:
        """Called before any model is loaded if one of them has a recurrent state, which compiled programs would not
        keep: from now on none is used or made."""

    def telling(self, tell: Callable[[str], None]) -> None:
        """From now on `tell` is called with what is going on while programs are made."""

    def doubles(self, weights: int, tied: int, device: torch.device, dtype: torch.dtype) -> int:
        """Bytes of a model's weights that this executor stores twice, out of `weights` bytes in all and `tied` bytes in
        an output matrix that is also the embedding."""
        return 0

    def bytes(self) -> int:
        """Bytes that the executor itself holds, such as graph pools."""
        return 0

    def notes(self) -> list[str]:
        """What a reader of the run's times must know, in sentences."""
        return []

    def facts(self) -> dict[str, Any]:
        """What it chose, for the field `executor` of results.json."""
        return {}
