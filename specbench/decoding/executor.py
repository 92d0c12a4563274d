"""Base class of executors: how a forward pass runs (with which products, compiled, or as a CUDA graph)."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from specbench.decoding.component import CodeIdentity, Component

Module = TypeVar("Module", bound=nn.Module)


def cache_argument(forward: Callable[..., Any]) -> str:
    """What a forward of transformers calls its cache: `cache` from 5.24 on; before, `past_key_values` or, if it keeps
    nothing but states, `cache_params`. Code that came with a checkpoint may use an older name than transformers."""
    names = inspect.signature(forward).parameters
    return next((name for name in ("cache", "cache_params") if name in names), "past_key_values")


def plain_parts(weight: Tensor) -> list[Tensor]:
    """The plain tensors of a weight, all of any shape: itself, or those that a quantiser's own kind consists of."""
    if not is_traceable_wrapper_subclass(weight):
        return [weight]
    return [part for name in weight.__tensor_flatten__()[0] for part in plain_parts(getattr(weight, name))]


@dataclass(frozen=True)
class Stored:
    """The weights of a module as an executor stores them."""

    numbers: int  # each weight once
    read: int  # bytes that a forward of one token would read of all of them
    held: int  # bytes, with second copies


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
        """Inside this context the cache uses these tensors, as `cache_tensors` has them, instead of its own."""


class Executor(Component):
    """Runs everything in PyTorch's eager mode; subclasses override what they run faster."""

    fixed_shapes = False  # whether drafts are padded to one width, so that few shapes occur
    captures_graphs = False  # whether calls keep memory of their own, for the estimate before a run
    compiles = False  # whether programs that are missing are made
    changes_modules = False  # whether `load` may change the module in place
    runs_encoders = True  # whether it can run encoder-decoders
    runs_recurrent = True  # whether it can run models with a recurrent state
    runs_divided = False  # whether it can run models whose weights are divided among processes or devices
    falls_back = False  # whether it runs what it cannot compile or capture as it is, after `run_eagerly`
    on_launch: Callable[[], None] | None = None  # the clock's, while a decoder is timed

    @classmethod
    def from_settings(cls, settings: Any, device: torch.device, run: Any, identity: CodeIdentity) -> "Executor":
        """Builds the executor for a device and the run's other choices; `identity` is that of its compiled code. Raises
        ConfigError if it cannot run there."""
        return cls()

    def load(self, module: Module, exact: bool = True) -> Module:
        """Returns the module to run in place of a freshly loaded one; unless `exact`, as for a quantised drafter, its
        results may differ by more than rounding."""
        return module

    def loaded(self) -> Any:
        """What it keeps of the modules that it has loaded so far, for `share`."""

    def share(self, loaded: Any) -> None:
        """Takes over `loaded` of another executor, of the same settings, that has loaded the module."""

    def stored(self, module: nn.Module) -> Stored:
        """The weights of a module that `load` returned; bytes are those that this process holds."""
        weights = list(module.parameters())
        held = sum(part.nbytes for weight in weights for part in plain_parts(weight))
        return Stored(sum(weight.numel() for weight in weights), held, held)

    def leaf(self, function: Callable[..., Any], model: HasCache | None = None) -> Callable[..., Any]:
        """Returns a faster version of a function of tensors. `model` is the model whose cache it changes."""
        return function

    def phase(
        self, function: Callable[..., Any], model: HasCache | None = None, usual: bool = True
    ) -> Callable[..., Any]:
        """As `leaf`, for a function that calls leaves, `usual` if this call has the shapes of most calls."""
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

    def columns(self, needed: int, capacity: int | None = None) -> int:
        """Number of cache columns to allocate for `needed` ones or, given the cache's `capacity`, to attend to."""
        return needed

    def lengths(self, columns: int) -> list[int]:
        """Text lengths, in tokens, to warm up: one per shape bucket up to `columns`; empty without buckets."""
        return []

    def prepare(self) -> None:
        """Called before each warm-up."""

    def ready(self) -> bool:
        """Called after each warm-up, when all usual shapes have been met. Whether it has to be done once more."""
        return False

    def compile_seconds(self, weights: int, others: "Sequence[Executor]" = ()) -> float | None:
        """About how long making the missing programs would take, `weights` as in `decide`; None if it has no say, or if
        the `others`, of ways that decode in turn, would not have them too."""
        return None

    def decide(self, seconds: float, least: float, weights: int, ways: int = 1) -> bool:
        """Whether the missing programs are made; if so, all `ways` that decode in turn are warmed up once more. Without
        them decoding takes so many seconds, `least` of them reading weights; a weight counts once for each program that
        reads it."""
        return False

    def without_programs(self, why: str = "") -> None:
        """From now on no program is used or made: called after a warm-up, `why` being a sentence for the notes."""

    def run_eagerly(self, why: str) -> None:
        """From now on functions run as they are: called before models are loaded that neither programs nor graphs can
        run, for the reason `why`."""

    def telling(self, tell: Callable[[str], None]) -> None:
        """From now on `tell` is called with what is going on while programs are made."""

    def held(self, weights: int, tied: int, device: torch.device, halves: bool) -> int:
        """Bytes that it will hold of `weights` bytes in the run's dtype, of which `tied` are an output matrix that is
        also the embedding. `halves`: the dtype is float32, and the values are those of a checkpoint in 16 bits."""
        return weights

    def few_bits(self, device: torch.device) -> bool:
        """Whether it stores quantised weights in 4 or 8 bits there, in place."""
        return False

    def bytes(self) -> int:
        """Bytes that the executor itself holds, such as graph pools."""
        return 0

    def notes(self) -> list[str]:
        """What a reader of the run's times must know, in sentences."""
        return []

    def facts(self) -> dict[str, Any]:
        """What it chose, for the field `executor` of results.json."""
        return {}
