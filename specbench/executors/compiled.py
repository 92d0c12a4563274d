"""Leaf functions compiled by TorchInductor, one program per set of shapes, kept on disk.

A leaf is traced once with `torch.export` and compiled ahead of its first call, so a call checks no guards and runs no
Python of the model. The whole draft of a small drafter is one leaf. Attention sees a bucket of the cache's columns, and
drafts are padded to one width, so that few shapes occur. Inductor's disk cache makes a second process start without
compiling.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from specbench.component import Choices
from specbench.decoding.executor import HasCache
from specbench.executors.arguments import flatten, rebuild
from specbench.executors.auto import AutoExecutor
from specbench.executors.buckets import bucket, bucket_lengths, refuse_growing_cache

SMALL_BYTES = 16e6  # of weights: a model below this stays in the processor's caches


class CompiledExecutor(AutoExecutor):
    """Runs compiled leaves, on a CPU with the fastest products."""

    fixed_shapes = True

    def __init__(self, *products: Any) -> None:
        super().__init__(*products)
        self.leaves: dict[Callable[..., Any], Leaf] = {}

    @classmethod
    def refuses(cls, settings: Any, run: Choices) -> str | None:
        return refuse_growing_cache(run)

    def leaf(self, function: Callable[..., Any], model: HasCache | None = None) -> Callable[..., Any]:
        if torch.compiler.is_compiling():  # part of a phase
            return function
        if function not in self.leaves:
            self.leaves[function] = Leaf(function, model)
        return self.leaves[function]

    def phase(
        self, function: Callable[..., Any], model: HasCache | None = None, usual: bool = True
    ) -> Callable[..., Any]:
        """Compiles a phase as one program if the model fits into the processor's caches, where calls and not weights
        take the time."""
        small = model is not None and model.weight_bytes < SMALL_BYTES
        return self.leaf(function, model) if usual and small else function

    def columns(self, needed: int, capacity: int | None = None) -> int:
        return bucket(needed, capacity)

    def lengths(self, columns: int) -> list[int]:
        return bucket_lengths(columns)


class Leaf:
    """A function of tensors, compiled for each set of shapes and constants that it is called with."""

    def __init__(self, function: Callable[..., Any], model: HasCache | None):
        self.function, self.model = function, model
        self.programs: dict[Any, tuple[Callable[..., Any], Any]] = {}
        self.traced_result: Any = None  # the description that rebuilds the result of the last trace

    def __call__(self, *arguments: Any) -> Any:
        """Runs the program for these shapes and constants, and compiles it first if there is none. Before the model's
        cache has tensors it runs the function itself."""
        stored = [] if self.model is None else self.model.cache_tensors()
        if self.model is not None and not stored:  # the cache takes its shape from a first forward
            return self.function(*arguments)
        spec, tensors = flatten(arguments)
        key = (spec, *((t.shape, t.stride(), t.dtype) for t in tensors), stored[0].shape if stored else None)
        if key not in self.programs:
            self.programs[key] = self._compile(spec, tensors, stored)
        program, result = self.programs[key]
        return rebuild(result, program(*tensors, *stored))

    def _compile(self, spec: Any, tensors: list[Tensor], stored: list[Tensor]) -> tuple[Callable[..., Any], Any]:
        traced = Traced(self, spec, len(tensors))
        inputs = (*tensors, *stored)
        exported = torch.export.export(traced, inputs, strict=False)
        with torch._inductor.config.patch({"cpp.threads": 1}):  # OpenMP threads would slow down oneDNN's
            program = torch._inductor.compile(exported.module(check_guards=False), [*inputs])
        return program, self.traced_result


class Traced(nn.Module):
    """A leaf in the form that `torch.export` needs: a module from tensors to a tuple of tensors."""

    def __init__(self, leaf: Leaf, spec: Any, arguments: int):
        super().__init__()
        self.leaf, self.spec, self.arguments = leaf, spec, arguments
        self.weights = None if leaf.model is None else leaf.model.module

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Takes the leaf's tensors and then the cache's, of any shape; returns the tensors of its result."""
        own, stored = tensors[: self.arguments], tensors[self.arguments :]
        model = self.leaf.model
        with contextlib.nullcontext() if model is None else model.on_cache(stored):
            result, found = flatten(self.leaf.function(*rebuild(self.spec, own)))
        self.leaf.traced_result = result
        return tuple(found)
