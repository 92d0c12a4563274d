"""Faults of the code for CUDA that tests on a CPU find: each is planted in the source of a function, and a test that
passes without it must fail."""

import importlib.util
import inspect
import linecache
import textwrap
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import test_cudagraph as graphs
import test_layer_graphs as layers
import torch

pytest.importorskip("triton")

from shared import traced_programs

from specbench.decoding.sampling import Sampling
from specbench.executors import cudagraph, packed_linear
from specbench.executors.cudagraph import Captured, CudaGraphExecutor
from specbench.executors.layer_programs import LayerCall
from specbench.kernels import attention
from specbench.models.language_model import LanguageModel
from specbench.verifiers.speculative import SpeculativeVerifier


def module_of(path: str) -> Any:
    """A module of tests in another folder."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, Path(__file__).parent.parent / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


kernels, fused = module_of("kernels/test_kernels.py"), module_of("decoding/test_fused.py")


class Fault(NamedTuple):
    """Source text of `name` of `owner`, what stands there instead, and the test that fails."""

    owner: Any
    name: str
    right: str
    wrong: str
    test: Callable[..., None]


def attends(case: str) -> Callable[..., None]:
    """The test of the attention kernel, on one of its cases."""
    return lambda tables, monkeypatch: kernels.test_the_kernel_computes_attention(case, None)


def decodes(tables: Any, monkeypatch: Any) -> None:
    graphs.test_graphs_change_no_token_and_never_wait_for_the_host("static", Sampling(), "model", tables)


def overwrites(tables: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(graphs.buckets, "SMALLEST_BUCKET", 8)
    graphs.test_no_replay_overwrites_what_is_still_read(1, 0, tables, None)


def packs(tables: Any, monkeypatch: Any) -> None:
    fused.test_a_packed_model_computes_the_same_and_holds_nothing_twice(True, monkeypatch)


def runs_layers(tables: Any, monkeypatch: Any) -> None:
    made = traced_programs(monkeypatch)
    layers.test_graphs_of_programs_of_layers_read_and_write_what_the_layers_do("sdpa", made)


def waits_for_streams(tables: Any, monkeypatch: Any) -> None:
    test_calls_before_a_capture_wait_for_the_current_stream_and_are_waited_for(monkeypatch)


FAULTS = {
    "the second tile of query rows is the first": Fault(
        attention, "attend_split", "r = tile * BM + tl.arange(0, BM)", "r = tl.arange(0, BM)", attends("large tree")),
    "later tiles see the columns of the first": Fault(
        attention, "share", "(tile + 1) * BM - 1", "BM - 1", attends("large tree")),
    "columns of the newest token are left out": Fault(
        attention, "sees_columns", "column[None, :] <= own", "column[None, :] < own", attends("chain")),
    "a window is one column too wide": Fault(
        attention, "sees_columns", "place[:, None] - WINDOW)", "place[:, None] - WINDOW - 1)", attends("window")),
    "entries of a tree are one off": Fault(
        attention, "sees_columns", "(first + N - M)", "(first + N - M + 1)", attends("newest of a tree")),
    "columns of a block are not counted from its begin": Fault(
        attention, "stored_at", "within = column % block", "within = column", attends("chain in blocks")),
    "heads of another group": Fault(
        attention, "attend_split", "head * G + r % G, r < N * G", "head + r % G, r < N * G", attends("chain")),
    "sums are not rescaled when a larger score comes": Fault(
        attention, "attend_split", "sums * shrink[:, None] +", "sums +", attends("chain in blocks")),
    "splits are merged with equal weights": Fault(
        attention, "merge", "sums += share_of[:, None] *", "sums +=", attends("chain in blocks")),
    "a split's weight lacks its sum": Fault(
        attention, "attend_split", "most + tl.log2(total)", "most", attends("chain in blocks")),
    "a replay reads the arguments of its capture": Fault(
        Captured, "_graph", "own.copy_(tensors[number])", "pass", decodes),
    "a graph of rows at other addresses is replayed": Fault(
        Captured, "_graph", "(t.data_ptr(), t.stride()) if own else None", "None",
        lambda tables, monkeypatch: graphs.test_graphs_of_rows_that_are_gone_are_dropped()),
    "columns beyond the first bucket are not read": Fault(
        CudaGraphExecutor, "columns", "bucket(needed, capacity)", "bucket(min(needed, 8), capacity)", overwrites),
    "a capture warms up on the cache itself": Fault(
        Captured, "_capture", "with stand_ins(self.models):", "with stand_ins([]):",
        lambda tables, monkeypatch: graphs.test_a_capture_leaves_the_cache_as_it_is(tables, monkeypatch)),
    "results stay in the pool": Fault(Captured, "_capture", "buffer.copy_(t)", "pass", decodes),
    "a graph asks the host": Fault(
        SpeculativeVerifier, "accept", "if self.greedy:", "if self.greedy or not p.sum().item():", decodes),
    "the length of the cache is that of the capture": Fault(
        LanguageModel, "_score", "rows.tokens, rows.length",
        "rows.tokens, vars(self).setdefault('stale', rows.length.clone())", decodes),
    "the calls before a capture do not wait for the stream": Fault(
        CudaGraphExecutor, "warm_up", "stream.wait_stream(torch.cuda.current_stream())", "pass", waits_for_streams),
    "nothing waits for the calls before a capture": Fault(
        CudaGraphExecutor, "warm_up", "torch.cuda.current_stream().wait_stream(stream)", "pass", waits_for_streams),
    "a shared product drops its bias": Fault(
        packed_linear, "_stack", "(weight, bias), layers = stacked(group), linear_layers(group)",
        "(weight, bias), layers = (stacked(group)[0], None), linear_layers(group)", packs),
    "parts of a shared product are exchanged": Fault(
        packed_linear.SharedProduct, "part", "self.parts[place]", "self.parts[-1 - place]", packs),
    "a layer's program serves another number of tokens": Fault(
        LayerCall, "_shared", "called = (*((t.shape, t.dtype) for t in tensors), cache.visible, cache.in_blocks)",
        "called = 1", runs_layers),
    "layers write where the first one does": Fault(
        LayerCall, "__call__", "cache.pools[number : number + 2]", "cache.pools[:2]", runs_layers),
    "a layer's program has the window of another": Fault(
        LayerCall, "__init__", "types[place] if isinstance(types, list) else None", "None",
        lambda tables, monkeypatch: layers.test_layers_with_another_window_have_another_program()),
    "keys and values are one tensor before a capture": Fault(
        cudagraph, "stand_ins", "number % 2", "0",
        lambda tables, monkeypatch: layers.test_keys_and_values_are_two_tensors_before_a_capture_too()),
    "garbage is collected in a capture": Fault(
        graphs, "no_garbage_collection", "gc.disable()", "pass",
        lambda tables, monkeypatch: graphs.test_no_garbage_is_collected_during_a_capture()),
}  # fmt: skip


IN_TURN = ("the second tile of query rows is the first", "splits are merged with equal weights")


def some_slow(fault: str) -> Any:
    """A parameter of a test; slow for most of the kernel's faults, since Triton's interpreter takes a second each."""
    slow = FAULTS[fault].owner is attention and fault not in IN_TURN
    return pytest.param(fault, marks=[pytest.mark.slow] if slow else [])


def planted(owner: Any, name: str, right: str, wrong: str) -> Any:
    """The function with other source text."""
    function = inspect.unwrap(getattr(owner, name))
    function = getattr(function, "fn", function)  # of a kernel
    source = textwrap.dedent(inspect.getsource(function))
    assert right in source, f"{name} has no {right!r}"
    head, *rest = source.rpartition(right)
    source = head + wrong + rest[1]
    file = f"<fault in {name}: {wrong}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    made: dict[str, Any] = {}
    exec(compile(source, file, "exec"), function.__globals__, made)
    return made[name]


@pytest.fixture
def splits(monkeypatch):
    """Four splits, as in the tests of the kernel."""
    monkeypatch.setattr(attention, "PROGRAMS", 8)


@pytest.mark.parametrize("fault", map(some_slow, FAULTS))
def test_a_fault_makes_a_test_fail(fault, tables, splits, monkeypatch):
    owner, name, right, wrong, test = FAULTS[fault]
    monkeypatch.setattr(owner, name, planted(owner, name, right, wrong))
    with pytest.raises((AssertionError, RuntimeError, IndexError, ValueError)):
        test(tables, monkeypatch)


@pytest.mark.parametrize(
    "fault",
    [
        "splits are merged with equal weights",
        "later tiles see the columns of the first",
        "a replay reads the arguments of its capture",
        "a graph of rows at other addresses is replayed",
        "columns beyond the first bucket are not read",
        "a capture warms up on the cache itself",
        "the calls before a capture do not wait for the stream",
        "a shared product drops its bias",
        "layers write where the first one does",
        "a layer's program has the window of another",
        "garbage is collected in a capture",
    ],
)
def test_without_a_change_the_same_function_passes(fault, tables, splits, monkeypatch):
    """Control of the control: planting itself breaks nothing."""
    owner, name, right, _, test = FAULTS[fault]
    monkeypatch.setattr(owner, name, planted(owner, name, right, right))
    test(tables, monkeypatch)


class Stream:
    """A stream of a device, which knows what it waited for."""

    def __init__(self, name: str):
        self.name, self.done = name, [name]

    def wait_stream(self, other: "Stream") -> None:
        self.done += other.done


def test_calls_before_a_capture_wait_for_the_current_stream_and_are_waited_for(monkeypatch):
    main, side = Stream("main"), Stream("side")
    current = [main]

    @contextmanager
    def stream(of):
        current.append(of)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "Stream", lambda: side)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    seen = []

    def call():
        seen.append("main's input" in current[-1].done)
        current[-1].done.append("result")
        return current[-1].name

    main.done.append("main's input")
    assert CudaGraphExecutor().warm_up(call) == "side" and all(seen) and len(seen) == cudagraph.WARM_UP_CALLS
    assert current == [main] and main.done.count("result") == len(seen)
