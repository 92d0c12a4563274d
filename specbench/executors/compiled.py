"""Functions compiled by `torch.compile`, each once for a set of shapes and constants and for any number of columns.

Inductor keeps what it compiled in its own cache on the disk, which later processes use.
"""

import logging
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specbench.errors import causes
from specbench.executors.base import HasCache
from specbench.executors.eager import EagerExecutor
from specbench.executors.pytree import Columns, bucket, flatten_arguments, rebuild

log = logging.getLogger(__name__)
STEP = 16  # cache columns: compiled code attends to a multiple of them
SMALL_BYTES = 16e6  # of weights: a model below this stays in the processor's caches
# OpenMP threads of compiled loops would slow down those of the products. Shapes and constants are compared before a
# compiled function is called.
OPTIONS: dict[str, Any] = {"cpp.threads": 1, "size_asserts": False, "alignment_asserts": False, "scalar_asserts": False}


class CompiledExecutor(EagerExecutor):
    """Compiles each function of tensors, the model's forward included, for the shapes of its calls."""

    fixed_shapes = True
    traces = True
    runs_recurrent = False

    def __init__(self, half_weights: bool = True):
        super().__init__(half_weights)
        self.functions: dict[Callable[..., Any], CompiledFunction] = {}

    def compiled(self, function: Callable[..., Any], *models: HasCache) -> Callable[..., Any]:
        if torch.compiler.is_compiling():  # part of a larger one
            return function
        if function not in self.functions:
            self.functions[function] = CompiledFunction(function, *models)
        return self.functions[function]

    def compiled_whole(self, function: Callable[..., Any], model: HasCache, usual: bool = True) -> Callable[..., Any]:
        """It is compiled whole if the model fits into the processor's caches: there calls take the time."""
        return self.compiled(function, model) if usual and model.weight_bytes < SMALL_BYTES else function

    def columns(self, needed: int, capacity: int | None = None) -> int:
        """A power of two is allocated, so that few shapes occur, and a multiple of STEP is attended to."""
        return bucket(needed) if capacity is None else Columns(min(capacity, -(-needed // STEP) * STEP))

    def notes(self) -> list[str]:
        failed = {function: own.failure for function, own in self.functions.items() if own.failure is not None}
        return [f"{function.__qualname__} was not compiled: {why}" for function, why in failed.items()]


class CompiledFunction:
    """A function with a compiled version for each set of shapes and constants that it is called with."""

    def __init__(self, function: Callable[..., Any], model: HasCache | None = None):
        self.function, self.model = function, model
        self.compiled: dict[Any, Callable[..., Any]] = {}
        self.failure: str | None = None  # why it runs as it is written

    def __call__(self, *arguments: Any) -> Any:
        """Runs what was compiled; before the first forward, which shapes the model's cache, the function itself."""
        stored = [] if self.model is None else self.model.cache_tensors()
        if self.failure is not None or (self.model is not None and not stored):
            return self.function(*arguments)
        spec, values = flatten_arguments(arguments)
        shapes = [None if type(t) is Columns else (t.shape, t.stride(), t.dtype) for t in values]
        key = (spec, *shapes, *(t.shape for t in stored[:1]), *(t.shape for t in stored[-1:]))
        given = [t.tensor() if type(t) is Columns else t for t in values]
        if key in self.compiled:
            return self.compiled[key](*given)
        for tensor, value in zip(given, values, strict=True):
            if type(value) is Columns:
                torch._dynamo.mark_dynamic(tensor, 0)
        try:
            self.compiled[key] = compiled_for(self.function, spec)
            return self.compiled[key](*given)
        except Exception as error:  # of a compiler that is not there, or of a function that it cannot compile
            self.failure = causes(error)
            log.warning("%s runs as it is written: %s", self.function.__qualname__, self.failure)
            log.info("the errors in full", exc_info=error)
            return self.function(*arguments)


def compiled_for(function: Callable[..., Any], spec: Any) -> Callable[..., Any]:
    """A version of the function for calls with tensors that are put into the description `spec`. PyTorch would compare
    all that it read of the model at each call, which takes longer than a small layer: nothing of it changes."""

    def call(*tensors: Tensor) -> Any:
        return function(*rebuild(spec, tensors))

    # PyTorch caches by code.
    own = types.FunctionType(call.__code__.replace(), globals(), "call", None, call.__closure__)
    options = OPTIONS | {"guard_filter_fn": lambda guards: [False] * len(guards)}
    return torch.compile(own, fullgraph=True, dynamic=False, options=options)
