"""Functions captured as CUDA graphs: a whole round of chains of a fixed gamma, else the draft, the target's call and
verify-accept-commit each; and the recorder's numbers.

A graph is keyed by the constants and shapes of its call (the bucket of cache columns among them) and by the addresses
that it uses in place: those of the state's rows, of the caches, and of what other captured functions returned. All else
is copied into buffers of its own before each replay. Nothing inside a graph waits for the host.

All graphs share one memory pool, and a replay overwrites what graphs captured later have put there (docs.pytorch.org,
notes/cuda.html, "Graph memory management"). So the last nodes of each graph copy its results into buffers outside the
pool, which serve a function's graphs of all shapes, and which the next graph reads. The calls before a capture, in
which CUDA chooses algorithms and loads kernels, run on copies of the rows and on a stand-in for the cache.
"""

import gc
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specbench.decoding.rows import Rows
from specbench.decoding.timer import Stage
from specbench.errors import causes
from specbench.executors.base import Executor, HasCache
from specbench.executors.pytree import bucket, flatten_arguments, rebuild

log = logging.getLogger(__name__)
WARM_UP_CALLS = 2  # calls before a capture, in which kernels choose algorithms and constants are made


class CudaGraphExecutor(Executor):
    """Captures each function that is called outside another capture."""

    fixed_shapes = True
    needs_cuda = True
    captures_graphs = whole_rounds = True
    runs_encoders = False
    runs_recurrent = False

    def __init__(self) -> None:
        self.not_captured: dict[str, str] = {}  # functions that run eagerly, and why
        self.marks: list[tuple[Stage, Any]] = []
        self.inside = False  # a captured function: what it calls is part of its graph
        self.captures, self.late = 0, 0  # captures in all, and those after warm-up
        self.functions: dict[Callable[..., Any], Captured] = {}
        self.static_addresses: set[int] = set()  # of results, which stay where they are
        self.pools: list[Any] = []  # the last one is used; others hold graphs from before a capture that failed
        gc.collect()  # models and graphs of an earlier run die in cycles
        self.stream: Any = None  # of captures and of the calls before them: each stream keeps workspaces of its own

    def compiled(self, function: Callable[..., Any], *models: HasCache) -> Callable[..., Any]:
        """A version of any function that runs as a CUDA graph. Arguments and results are tensors and hashable
        constants, tuples and dataclasses of them. It may change `Rows` among its arguments, and the caches of the
        models, in place; nothing else. A result is valid until the function's next call."""
        if self.inside or not self.captures_graphs:
            return function
        if function not in self.functions:
            self.functions[function] = Captured(function, models, self)
        return self.functions[function]

    def mark(self, stage: Stage) -> None:
        """Notes the time by an event, which is a node of the graph: each replay records it again."""
        event = torch.cuda.Event(enable_timing=True, external=True)
        event.record()
        self.marks = [*self.marks, (stage, event)]  # a list of its own, since graphs keep theirs

    def columns(self, needed: int, capacity: int | None = None) -> int:
        return bucket(needed, capacity) if self.captures_graphs else needed

    def lengths(self, columns: int) -> list[int]:
        """One in each bucket, longest first, so that smaller graphs find their memory in the pool."""
        if not self.captures_graphs:
            return []
        sizes = [bucket(1)]
        while sizes[-1] < columns:
            sizes.append(2 * sizes[-1])
        return [*(size // 2 + 1 for size in sizes[:0:-1]), 2]

    def run_eagerly(self, why: str) -> None:
        self.captures_graphs = self.whole_rounds = self.fixed_shapes = False
        self.not_captured["everything"] = f"eagerly: {why}"

    def give_up(self, captured: "Captured", error: Exception) -> None:
        """Notes that a function could not be captured, with the whole chain of errors in the log."""
        self.late += self.warm
        instead = "eagerly" if len(captured.models) < 2 else "in stages"
        if instead == "in stages":
            self.whole_rounds, captured.graphs = False, {}
        why = ("after warm-up: " if self.warm else "") + causes(error)
        self.not_captured[captured.name] = f"{instead}: {why}"
        log.warning("%s could not be captured as a CUDA graph, and runs %s: %s", captured.name, instead, why)
        log.info("the errors in full", exc_info=error)

    def notes(self) -> list[str]:
        found = [f"{name} was not captured as a CUDA graph and ran {how}" for name, how in self.not_captured.items()]
        if self.late:
            found.append(f"CUDA graphs captured after warm-up: {self.late}; rounds that waited for them took longer")
        return found

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside this context functions run as they are: a function around them is captured."""
        before, self.inside = self.inside, True
        try:
            yield
        finally:
            self.inside = before

    # -- What needs CUDA ------------------------------------------------------------------------

    def side_stream(self) -> Any:
        """A stream of the current device, the same one each time."""
        self.stream = self.stream or torch.cuda.Stream()
        return self.stream

    def warm_up(self, function: Callable[[], Any]) -> Any:
        """Runs the function on a side stream, as CUDA requires before a capture; returns its last results."""
        stream = self.side_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_CALLS):
                found = function()
        torch.cuda.current_stream().wait_stream(stream)
        return found

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        """Captures a function, which leaves its results outside the pool. Returns a function that replays the graph. If
        it raises, the current stream is what it was, and later captures use a pool of their own."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            pool = self.pools[-1] if self.pools else None
            with no_garbage_collection(), torch.cuda.graph(graph, pool=pool, stream=self.side_stream()):
                function()
        except BaseException:
            torch.cuda.set_stream(stream)  # the end of a failed capture raises before it leaves its own
            self.pools, self.stream = [*self.pools, torch.cuda.graph_pool_handle()], None
            raise
        self.pools = self.pools or [graph.pool()]
        return graph.replay


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Inside this context no cycle is freed: one that owns a graph would end a capture with an error."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(frozen=True)
class Graph:
    """A captured call."""

    replay: Callable[[], None]
    copied: list[tuple[int, Tensor]]  # number of an argument's tensor, and the graph's own buffer for it
    result: Any
    marks: list[tuple[Stage, Any]]
    alive: list[weakref.ref[Tensor]]  # rows and cache at the addresses in the graph


class Captured:
    """A function with a CUDA graph for each set of shapes, constants and addresses that it is called with."""

    def __init__(self, function: Callable[..., Any], models: Sequence[HasCache], executor: CudaGraphExecutor):
        self.function, self.models, self.executor = function, models, executor
        self.name = " of ".join([function.__qualname__, *(model.name for model in models)])
        self.given_up = False  # since it could not be captured, or memory for more graphs is lacking
        self.graphs: dict[Any, Graph] = {}
        self.buffers: dict[int, list[Tensor]] = {}  # by number of the result's tensor, bytes for it

    def __call__(self, *arguments: Any) -> Any:
        """Replays the graph for these shapes, constants and addresses, and captures it first if there is none. Runs the
        function itself if it cannot be captured, and before the first forward, which shapes a model's cache."""
        caches = [model.cache_tensors() for model in self.models]
        graph = self._graph(arguments, [t for cache in caches for t in cache]) if all(caches) else None
        self.executor.marks = [] if graph is None else graph.marks
        if graph is None:
            with self.executor.whole():
                return self.function(*arguments)
        graph.replay()
        return graph.result

    def _graph(self, arguments: Sequence[Any], stored: Sequence[Tensor]) -> Graph | None:
        """The graph for a call, whose arguments are copied to where it reads them; None if it cannot be captured."""
        spec, tensors = flatten_arguments(arguments)
        rows = {id(t) for a in arguments if isinstance(a, Rows) for t in vars(a).values()}
        in_place = [id(t) in rows or t.data_ptr() in self.executor.static_addresses for t in tensors]
        kinds = [
            (t.shape, t.dtype, (t.data_ptr(), t.stride()) if own else None)
            for t, own in zip(tensors, in_place, strict=True)
        ]
        key = (spec, *kinds, *((t.shape, t.dtype, t.data_ptr()) for t in stored))
        graph = self.graphs.get(key)
        if graph is None and self.given_up:
            return None
        if graph is None:
            for function in self.executor.functions.values():
                function.forget_stale()
            alive = [weakref.ref(t) for t in (*stored, *(t for t in tensors if id(t) in rows))]
            try:
                graph = self.graphs[key] = self._capture(spec, tensors, in_place, alive)
            except Exception as error:  # of CUDA, of Triton, of a compiler that is not there
                self.given_up = True
                if not isinstance(error, torch.OutOfMemoryError):
                    self.graphs = {}
                self.executor.give_up(self, error)
                return None
        for number, own in graph.copied:
            own.copy_(tensors[number])
        return graph

    def _capture(
        self, spec: Any, tensors: list[Tensor], in_place: list[bool], alive: list[weakref.ref[Tensor]]
    ) -> Graph:
        """Runs the function on copies to warm up, and captures it; `in_place` says which tensors are used in place."""
        copies = [t.clone() for t in tensors]
        inputs = [t if own else copy for t, copy, own in zip(tensors, copies, in_place, strict=True)]
        executor = self.executor
        with executor.whole():
            with stand_in_caches(self.models):
                found = executor.warm_up(lambda: self.function(*rebuild(spec, copies)))
            result, like = flatten_arguments(found)
            kept = [self._buffer(number, t) for number, t in enumerate(like)]

            def call() -> None:
                _, made = flatten_arguments(self.function(*rebuild(spec, inputs)))
                for buffer, t in zip(kept, made, strict=True):
                    buffer.copy_(t)

            executor.marks = []
            replay = executor.capture(call)
        executor.captures += 1
        executor.late += executor.warm
        copied = [(number, copies[number]) for number, own in enumerate(in_place) if not own]
        return Graph(replay, copied, rebuild(result, kept), executor.marks, alive)

    def _buffer(self, number: int, like: Tensor) -> Tensor:
        """Memory outside the pool for this tensor of the result; graphs of other shapes use it too."""
        made = self.buffers.setdefault(number, [])
        found = next((buffer for buffer in made if buffer.nbytes >= like.nbytes), None)
        if found is None:
            found = torch.empty(like.nbytes, dtype=torch.uint8, device=like.device)
            made.append(found)
            if like.nbytes:
                self.executor.static_addresses.add(found.data_ptr())
        return found[: like.nbytes].view(like.dtype).view(like.shape)

    def forget_stale(self) -> None:
        """Drops the graphs whose rows or caches are no longer there: nothing can ask for them."""
        self.graphs = {key: g for key, g in self.graphs.items() if all(ref() is not None for ref in g.alive)}


@contextmanager
def stand_in_caches(models: Sequence[HasCache]) -> Iterator[None]:
    """Inside this context the caches of the models use other tensors, of each shape and model two, for keys and for
    values: enough to run the same kernels, and as large as one layer."""
    with ExitStack() as stack:
        for model in models:
            copies: dict[Any, Tensor] = {}
            kinds = []
            for number, t in enumerate(model.cache_tensors()):
                kinds.append((number % 2, t.shape, t.dtype))
                if kinds[-1] not in copies:
                    copies[kinds[-1]] = t.clone()
            stack.enter_context(model.on_cache([copies[kind] for kind in kinds]))
        yield
