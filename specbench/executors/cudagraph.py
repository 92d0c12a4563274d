"""Functions captured as CUDA graphs: the draft, the target's call, verify-accept-commit, and the recorder's numbers.

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
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from specbench.component import Selections
from specbench.decoding.component import CodeIdentity
from specbench.decoding.executor import Executor, HasCache, Module, Stored
from specbench.decoding.rows import Rows
from specbench.errors import causes
from specbench.executors.compile_cache import Programs
from specbench.executors.compiled_function import Leaf
from specbench.executors.layer_programs import LEAST_LAYERS, LayerPrograms, runs_by_layers
from specbench.executors.packed_linear import packed, twin_of, with_packed
from specbench.executors.pytree import bucket, bucket_lengths, flatten_arguments, rebuild, refuse_growing_cache
from specbench.kernels import ops
from specbench.settings import BaseSettings

log = logging.getLogger(__name__)
WARM_UP_CALLS = 2  # calls before a capture, in which kernels choose algorithms and constants are made


class CudaGraphExecutor(Executor):
    """Captures each leaf and phase that is called outside another capture."""

    fixed_shapes = True
    captures_graphs = True
    runs_encoders = False
    runs_recurrent = False

    class Settings(BaseSettings):
        compile: Literal["true", "layers", "false"] = "true"

    def __init__(
        self, programs: Programs | None = None, compiles: bool = True, falls_back: bool = False, by_layers: bool = False
    ) -> None:
        """Leaves run as `programs` or, `by_layers`, the layers of models as one program each; without any they run as
        they are. Those that are missing are compiled if it `compiles`, else none is used unless all are there.
        `falls_back` is as in the base class."""
        self.kept = programs if programs is not None and (compiles or programs.any or by_layers) else None
        self.programs = None if by_layers else self.kept
        self.layers = LayerPrograms(self.kept, graphs=True) if by_layers and self.kept is not None else None
        self.compiles, self.falls_back = compiles and self.kept is not None, falls_back
        self.by_layers = self.layers is not None  # and its own graphs hold them
        if self.layers is not None and compiles:
            self.layers.start()
        self.left_out: str | None = None  # why programs that were there are not used
        self.not_captured: dict[str, str] = {}  # functions that run eagerly, and why
        self.leaves: dict[Callable[..., Any], Leaf] = {}
        self.inside = False  # a captured function: what it calls is part of its graph
        self.warm = False  # warm-up is over
        self.captures, self.late = 0, 0  # captures in all, and those after warm-up
        self.capture_seconds = 0.0  # of all, with the calls and compilations before each
        self.functions: dict[Callable[..., Any], Captured] = {}
        self.places: set[int] = set()  # addresses of results, which stay where they are
        self.pools: list[Any] = []  # the last one is used; others hold graphs from before a capture that failed
        self.stream: Any = None  # of captures and of the calls before them: each stream keeps workspaces of its own

    @classmethod
    def from_settings(
        cls, settings: Any, device: torch.device, run: Selections, identity: CodeIdentity
    ) -> "CudaGraphExecutor":
        programs = None if settings.compile == "false" else Programs.stored(identity)
        return cls(programs, by_layers=settings.compile == "layers")

    @classmethod
    def refuses(cls, settings: Any, run: Selections) -> str | None:
        if not run.device.startswith("cuda"):
            return f"on device={run.device}: it needs CUDA, use executor=compiled"
        if settings.compile == "layers" and not run["cache"].kind.in_place:
            return f"with executor.compile=layers and cache={run['cache'].name}: use cache=static"
        return refuse_growing_cache(run)

    def load(self, module: Module, exact: bool = True) -> Module:
        """One product for layers with the same input, whose results may differ by the rounding of the dtype."""
        found = packed(module)
        if self.layers is not None and not runs_by_layers(found):
            found = twin_of(module) if found is module else found
            self.layers.attach(found)
        return found

    def loaded(self) -> LayerPrograms | None:
        return self.layers

    def share(self, loaded: LayerPrograms | None) -> None:
        if loaded is not None:
            self.layers, self.kept = loaded, loaded.kept

    def stored(self, module: nn.Module) -> Stored:
        return with_packed(super().stored(module), module)

    def few_bits(self, device: torch.device) -> bool:
        return ops.run_on(device)

    def leaf(self, function: Callable[..., Any], model: HasCache | None = None) -> Callable[..., Any]:
        models = () if model is None else (model,)
        if self.programs is None or torch.compiler.is_compiling():
            return self.captured(function, models)
        if function not in self.leaves:
            self.leaves[function] = Leaf(function, model, self.programs, self.compiles)
        return self.captured(self.leaves[function], models)

    def phase(
        self, function: Callable[..., Any], model: HasCache | None = None, usual: bool = True
    ) -> Callable[..., Any]:
        """A phase itself is not compiled: it calls leaves, and all of it is one graph."""
        return self.captured(function, () if model is None else (model,))

    def captured(self, function: Callable[..., Any], models: Sequence[HasCache]) -> Callable[..., Any]:
        """A version of any function that runs as a CUDA graph. Arguments and results are tensors and hashable
        constants, tuples and dataclasses of them. It may change `Rows` among its arguments, and the caches of these
        models, in place; nothing else. A result is valid until the function's next call."""
        if self.inside or not self.captures_graphs:
            return function
        if function not in self.functions:
            self.functions[function] = Captured(function, models, self)
        return self.functions[function]

    def columns(self, needed: int, capacity: int | None = None) -> int:
        return bucket(needed, capacity) if self.captures_graphs else needed

    def lengths(self, columns: int) -> list[int]:
        """Longest first, so that smaller graphs find their memory in the pool."""
        return bucket_lengths(columns)[::-1] if self.captures_graphs else []

    def prepare(self) -> None:
        self.warm = False
        if self.layers is not None:
            self.layers.compiles = self.compiles
        gc.collect()  # models and graphs of an earlier run die in cycles

    def ready(self) -> bool:
        """If a program was missing and none is made, all graphs are captured again without programs."""
        self.warm = True
        if self.layers is not None:
            self.layers.compiles = False  # in what is timed
        if self.by_layers and self.layers is not None and (self.layers.missed or not self.layers.used):
            self.without_programs("not all layers have a compiled program that is right, so none was used, see run.log")
            return True
        lacking = 0 if self.compiles else self.missed
        if lacking:
            self.without_programs(
                f"{lacking} calls had no compiled program, so none was used: executor=cudagraph makes them"
            )
        return lacking > 0

    @property
    def missed(self) -> int:
        """Calls for which there was no program."""
        of_layers = self.layers.missed if self.layers is not None and self.by_layers else 0
        return of_layers + sum(leaf.missed for leaf in self.leaves.values())

    def without_programs(self, why: str = "") -> None:
        self.programs, self.leaves, self.functions, self.compiles = None, {}, {}, False
        if self.layers is not None:
            self.layers.used = self.by_layers = False
        self.places, self.left_out = set(), self.left_out or why or None

    def run_eagerly(self, why: str) -> None:
        self.captures_graphs = self.fixed_shapes = False
        self.without_programs(f"nothing was captured as a CUDA graph: {why}")

    def give_up(self, captured: "Captured", error: Exception) -> None:
        """Notes that a function could not be captured, with the whole chain of errors in the log."""
        self.late += self.warm
        name = " of ".join([captured.name, *(str(getattr(model, "name", "")) for model in captured.models)])
        self.not_captured[name] = ("after warm-up: " if self.warm else "") + causes(error)
        log.warning("%s runs eagerly, since it could not be captured: %s", name, self.not_captured[name])
        log.info("the errors in full", exc_info=error)

    @property
    def graphs(self) -> int:
        """Graphs that can be replayed now."""
        return sum(len(function.graphs) for function in self.functions.values())

    def bytes(self) -> int:
        return self.pool_bytes() + sum(function.bytes() for function in self.functions.values())

    def facts(self) -> dict[str, Any]:
        kept = self.kept or Programs(None)
        used = (self.by_layers or self.programs is not None) and kept.found + kept.made > 0
        programs = {"used": used, "found": kept.found, "made": kept.made, "seconds": kept.seconds,
                    "missed": self.missed, "left_out": self.left_out}  # fmt: skip
        return {"graphs": self.graphs, "captures": self.captures, "captures_after_warm_up": self.late,
                "capture_seconds": self.capture_seconds,
                "not_captured": self.not_captured, "bytes": self.bytes(),
                "programs": programs}  # fmt: skip

    def notes(self) -> list[str]:
        found = [self.left_out] if self.left_out else []
        if self.kept is not None:
            found += self.kept.notes()
        if self.by_layers and self.layers is not None and not self.layers.running:
            found.append(
                f"no layers ran as programs: a model needs {LEAST_LAYERS} of one class, without experts, that "
                "transformers gives the cache"
            )
        elif self.by_layers and self.missed:  # before the end of warm-up it would have left out all programs
            found.append(f"{self.missed} calls of layers after warm-up had no compiled program: times mix both")
        if self.late:
            found.append(
                f"CUDA graphs captured after warm-up: {self.late}; the rounds that waited for them took longer"
            )
        for name, why in self.not_captured.items():
            found.append(f"{name} was not captured as a CUDA graph and ran eagerly: {why}")
        return found

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside this context leaves run as they are: a function around them is captured."""
        before, self.inside = self.inside, True
        try:
            with nullcontext() if self.layers is None else self.layers.in_graph():
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

    def pool_bytes(self) -> int:
        """Bytes that the pools have of the device."""
        if not self.pools:
            return 0
        own = {tuple(pool) for pool in self.pools}
        return sum(s["total_size"] for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) in own)


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
    alive: list[weakref.ref[Tensor]]  # rows and cache at the addresses in the graph


class Captured:
    """A function with a CUDA graph for each set of shapes, constants and addresses that it is called with."""

    def __init__(self, function: Callable[..., Any], models: Sequence[HasCache], executor: CudaGraphExecutor):
        self.function, self.models, self.executor = function, models, executor
        self.name = str(getattr(getattr(function, "function", function), "__qualname__", function))
        self.given_up = False  # since it could not be captured, or memory for more graphs is lacking
        self.graphs: dict[Any, Graph] = {}
        self.buffers: dict[int, list[Tensor]] = {}  # by number of the result's tensor, bytes for it

    def __call__(self, *arguments: Any) -> Any:
        """Replays the graph for these shapes, constants and addresses, and captures it first if there is none. Runs the
        function itself if it cannot be captured, and as long as a cache has no tensors: it takes its shape from a first
        forward."""
        caches = [model.cache_tensors() for model in self.models]
        graph = self._graph(arguments, caches) if all(caches) else None
        if graph is None:
            with self.executor.whole():
                return self.function(*arguments)
        self.executor.launching()
        graph.replay()
        return graph.result

    def _graph(self, arguments: Sequence[Any], caches: Sequence[Sequence[Tensor]]) -> Graph | None:
        """The graph for a call, whose arguments are copied to where it reads them; None if it cannot be captured."""
        stored = [t for cache in caches for t in cache]
        spec, tensors = flatten_arguments(arguments)
        rows = {id(t) for a in arguments if isinstance(a, Rows) for t in vars(a).values()}
        stays = [id(t) in rows or t.data_ptr() in self.executor.places for t in tensors]
        kinds = [(t.shape, t.dtype, (t.data_ptr(), t.stride()) if own else None)
                 for t, own in zip(tensors, stays, strict=True)]  # fmt: skip
        key = (spec, *kinds, *((t.shape, t.dtype, t.data_ptr()) for t in stored))
        graph = self.graphs.get(key)
        if graph is None and self.given_up:
            return None
        if graph is None:
            for function in self.executor.functions.values():
                function.forget_stale()
            alive = [weakref.ref(t) for t in (*stored, *(t for t in tensors if id(t) in rows))]
            began = time.perf_counter()
            try:
                graph = self.graphs[key] = self._capture(spec, tensors, stays, alive)
                self.executor.capture_seconds += time.perf_counter() - began
            except Exception as error:  # of CUDA, of Triton, of a compiler that is not there
                self.given_up = True
                if not isinstance(error, torch.OutOfMemoryError):
                    self.graphs = {}
                self.executor.give_up(self, error)
                return None
        for number, own in graph.copied:
            own.copy_(tensors[number])
        return graph

    def _capture(self, spec: Any, tensors: list[Tensor], stays: list[bool], alive: list[weakref.ref[Tensor]]) -> Graph:
        """Runs the function on copies to warm up, and captures it; `stays` says which tensors are used in place."""
        copies = [twin(t) for t in tensors]
        inputs = [t if own else copy for t, copy, own in zip(tensors, copies, stays, strict=True)]
        executor = self.executor
        with executor.whole():
            with stand_ins(self.models):
                found = executor.warm_up(lambda: self.function(*rebuild(spec, copies)))
            result, like = flatten_arguments(found)
            kept = [self._buffer(number, t) for number, t in enumerate(like)]

            def call() -> None:
                _, made = flatten_arguments(self.function(*rebuild(spec, inputs)))
                for buffer, t in zip(kept, made, strict=True):
                    buffer.copy_(t)

            replay = executor.capture(call)
        executor.captures += 1
        executor.late += executor.warm
        copied = [(number, copies[number]) for number, own in enumerate(stays) if not own]
        return Graph(replay, copied, rebuild(result, kept), alive)

    def _buffer(self, number: int, like: Tensor) -> Tensor:
        """Memory outside the pool for this tensor of the result; graphs of other shapes use it too."""
        made = self.buffers.setdefault(number, [])
        found = next((buffer for buffer in made if buffer.nbytes >= like.nbytes), None)
        if found is None:
            found = torch.empty(like.nbytes, dtype=torch.uint8, device=like.device)
            made.append(found)
            if like.nbytes:
                self.executor.places.add(found.data_ptr())
        return found[: like.nbytes].view(like.dtype).view(like.shape)

    def forget_stale(self) -> None:
        """Drops the graphs whose rows or caches are no longer there: nothing can ask for them."""
        self.graphs = {key: g for key, g in self.graphs.items() if all(ref() is not None for ref in g.alive)}

    def bytes(self) -> int:
        """Bytes of results and of the graphs' own inputs."""
        inputs = sum(own.nbytes for graph in self.graphs.values() for _, own in graph.copied)
        return inputs + sum(buffer.nbytes for made in self.buffers.values() for buffer in made)


def twin(t: Tensor) -> Tensor:
    """A copy of a tensor of any shape with the same strides: a program of Inductor is for these. If several of its
    entries are one place in memory, the copy is contiguous."""
    if any(step == 0 and size > 1 for size, step in zip(t.shape, t.stride(), strict=True)):
        return t.clone()
    return t.new_empty_strided(t.shape, t.stride()).copy_(t)


@contextmanager
def stand_ins(models: Sequence[HasCache]) -> Iterator[None]:
    """Inside this context the caches of the models use other tensors, two in turn for all of the same shape, since keys
    and values must not be one: enough to run the same kernels, and as large as one of many layers."""
    with ExitStack() as stack:
        for model in models:
            copies: dict[Any, Tensor] = {}
            stored = [((number % 2, t.shape, t.dtype), t) for number, t in enumerate(model.cache_tensors())]
            for kind, t in stored:
                if kind not in copies:
                    copies[kind] = t.clone()
            stack.enter_context(model.on_cache([copies[kind] for kind, _ in stored]))
        yield
