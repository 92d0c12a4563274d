"""Phases captured as CUDA graphs: the whole draft, the target's call, and verify-accept-commit.

A graph is keyed by the shapes and constants of its call, the bucket of cache columns among them, and replays on the
same addresses: the state's tensors and the cache are used where they are, everything else is copied into the graph's
own buffers. All graphs share one memory pool. Nothing inside a graph waits for the host; the round's one
synchronisation is the stop check after it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specbench.component import Choices
from specbench.decoding.executor import Executor, HasCache
from specbench.decoding.state import Rows
from specbench.executors.arguments import flatten, rebuild
from specbench.executors.buckets import bucket, bucket_lengths, refuse_growing_cache
from specbench.settings import BaseSettings, setting

WARM_UP_CALLS = 2  # calls before a capture, in which kernels choose algorithms and constants are made


class CudaGraphExecutor(Executor):
    """Captures each leaf and phase that is called outside another capture; at most `max_graphs` graphs."""

    fixed_shapes = True

    @dataclass
    class Settings(BaseSettings):
        max_graphs: int = setting(ge=1, le=10_000)

    def __init__(self, max_graphs: int):
        self.max_graphs, self.inside = max_graphs, False  # inside a phase nothing else is captured
        self.phases: dict[Callable[..., Any], Phase] = {}
        self.graphs, self.pool_bytes = 0, 0
        self.pool: Any = None

    @classmethod
    def from_settings(
        cls, settings: Settings, device: torch.device, run: Choices, identity: str
    ) -> "CudaGraphExecutor":
        return cls(settings.max_graphs)

    @classmethod
    def refuses(cls, settings: Any, run: Choices) -> str | None:
        if not run.device.startswith("cuda"):
            return f"on device={run.device}: it needs CUDA, use executor=compiled"
        return refuse_growing_cache(run)

    def leaf(self, function: Callable[..., Any], model: HasCache | None = None) -> Callable[..., Any]:
        if self.inside:
            return function
        if function not in self.phases:
            self.phases[function] = Phase(function, model, self)
        return self.phases[function]

    def phase(
        self, function: Callable[..., Any], model: HasCache | None = None, usual: bool = True
    ) -> Callable[..., Any]:
        return self.leaf(function, model)

    def columns(self, needed: int, capacity: int | None = None) -> int:
        return bucket(needed, capacity)

    def lengths(self, columns: int) -> list[int]:
        """Longest first, so that smaller graphs find their memory in the pool."""
        return bucket_lengths(columns)[::-1]

    def bytes(self) -> int:
        return self.pool_bytes

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside this context leaves run as they are, because a phase around them is captured."""
        self.inside = True
        try:
            yield
        finally:
            self.inside = False

    def capture(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Captures a function without arguments. Returns a function that replays the graph, and the outputs, which
        every replay overwrites."""
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.memory_reserved()
        with torch.cuda.graph(graph, pool=self.pool):
            outputs = function()
        self.pool = self.pool or graph.pool()
        self.pool_bytes += torch.cuda.memory_reserved() - before
        return graph.replay, outputs

    def warm_up(self, function: Callable[[], Any]) -> None:
        """Runs the function a few times on a side stream, as CUDA requires before a capture."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_CALLS):
                function()
        torch.cuda.current_stream().wait_stream(stream)


class Phase:
    """A function with a CUDA graph for each set of shapes and constants that it is called with."""

    def __init__(self, function: Callable[..., Any], model: HasCache | None, executor: CudaGraphExecutor):
        self.function, self.model, self.executor = function, model, executor
        self.captured: dict[Any, tuple[Callable[[], None], list[Tensor], Any]] = {}

    def __call__(self, *arguments: Any) -> Any:
        """Replays the graph for these shapes and constants, and captures it first if there is none. Runs the function
        itself if the limit of graphs is reached, or before the model's cache has tensors."""
        stored = [] if self.model is None else self.model.cache_tensors()
        if self.model is not None and not stored:  # the cache takes its shape from a first forward
            return self._run(arguments)
        spec, tensors = flatten(arguments)
        fixed = {id(t) for a in arguments if isinstance(a, Rows) for t in vars(a).values()}
        places = [t.data_ptr() for t in (*stored, *(t for t in tensors if id(t) in fixed))]
        key = (spec, *places, *((t.shape, t.dtype) for t in tensors))
        if key not in self.captured:
            if self.executor.graphs >= self.executor.max_graphs:
                return self._run(arguments)
            self.captured[key] = self._capture(spec, tensors, fixed)
        replay, inputs, outputs = self.captured[key]
        for own, given in zip(inputs, tensors, strict=True):
            if own is not given:
                own.copy_(given)
        self.executor.launching()
        replay()
        return outputs

    def _run(self, arguments: tuple[Any, ...]) -> Any:
        with self.executor.whole():
            return self.function(*arguments)

    def _capture(
        self, spec: Any, tensors: list[Tensor], fixed: set[int]
    ) -> tuple[Callable[[], None], list[Tensor], Any]:
        """Runs the function to warm up, restores the state's tensors, and captures it. Returns the replay, its input
        tensors and its outputs."""
        inputs = [t if id(t) in fixed else t.clone() for t in tensors]
        before = [t.clone() for t in inputs]

        def call() -> Any:
            return self.function(*rebuild(spec, inputs))

        executor = self.executor
        with executor.whole():
            executor.warm_up(call)
            replay, outputs = executor.capture(call)
        for now, then in zip(inputs, before, strict=True):
            now.copy_(then)
        executor.graphs += 1
        return replay, inputs, outputs
