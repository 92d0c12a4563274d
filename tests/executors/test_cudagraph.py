"""The graph executor. Without a GPU it is tested on a model of graphs and of their memory (`graph_memory.py`)."""

import contextlib
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from choosing import in_turn
from decoder_cases import TREES, logits_of, tabular_model, verifier_of
from distribution_cases import learning_policy
from graph_memory import SimulatedGraphs, graphs_of
from scheduler_cases import decode, jobs

from specbench.decoding import verify_tree
from specbench.decoding.sampling import Sampling
from specbench.decoding.sequence import Sequence
from specbench.decoding.state import State
from specbench.drafters.model import ModelDrafter
from specbench.executors import cudagraph
from specbench.executors import pytree as buckets
from specbench.executors.cudagraph import Captured, CudaGraphExecutor
from specbench.executors.eager import DefaultExecutor, EagerExecutor
from specbench.measure.recorder import round_numbers
from specbench.policies.base import VaryingGamma
from specbench.policies.stopping import EntropyGamma
from specbench.verifiers.base import SpeculativeVerifier


@pytest.mark.parametrize(("sampling", "cache", "kind"), in_turn(
    [Sampling(), Sampling(temperature=0), Sampling(temperature=0.7, top_k=5, top_p=0.9, repetition_penalty=1.3)],
    [("static", "model"), ("paged", None), ("paged", "model"), ("static", None)],
))  # fmt: skip
def test_graphs_change_no_token_and_never_wait_for_the_host(cache, sampling, kind, tables):
    expected = decode(jobs(), 3, tables, cache, kind, sampling=sampling)
    executor = SimulatedGraphs()
    assert decode(jobs(), 3, tables, cache, kind, sampling=sampling, executor=executor) == expected
    names = {getattr(f, "__name__", "") for f in executor.functions}
    assert names - {"accept_and_commit", "scored"} == ({"_round"} if kind else set())
    assert executor.replays > graphs_of(executor) > 0


@pytest.mark.parametrize(("kind", "sampling"), in_turn(
    (*TREES, "blockwise", "pass_lookahead", "early_exit", "under_under_model"),
    [(Sampling(),), (Sampling(temperature=0),)],
    ("tree_independent", "tree_distinct", "multi_draft", "medusa", "early_exit"),
))  # fmt: skip
def test_graphs_change_no_token_of_other_drafts(kind, sampling, tables, monkeypatch):
    expected = decode(jobs(), 3, tables, kind=kind, sampling=sampling)
    monkeypatch.setattr(verify_tree, "nobody", lambda mask: False)  # as on a GPU
    executor = SimulatedGraphs()
    assert decode(jobs(), 3, tables, kind=kind, sampling=sampling, executor=executor) == expected
    assert executor.replays > graphs_of(executor) > 0


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0)], ids=str)
def test_graphs_change_no_token_of_drafts_that_end_early(sampling, tables):
    def policy():
        return learning_policy(EntropyGamma, largest=4)

    expected = decode(jobs(), 3, tables, sampling=sampling, policy=policy())
    executor = SimulatedGraphs()
    assert decode(jobs(), 3, tables, sampling=sampling, policy=policy(), executor=executor) == expected
    assert "_step" in {getattr(f, "__name__", "") for f in executor.functions}
    assert executor.replays > graphs_of(executor)


LONG = [Sequence([1, 2], 50, 7), Sequence([3], 44, 9)]  # from the first bucket of columns to the last


def numbers_of_rounds(executor, tables, rows, temperature, policy=None, device=None):
    """Tokens, and what the recorder computes in each round, of a pair in several buckets of columns."""
    sampling, found = Sampling(temperature=temperature), []
    verifier, reduce = verifier_of(SpeculativeVerifier, sampling), executor.compiled(round_numbers)

    def record(state, scores, draft, verdict, kept):
        found.append(reduce(scores.p, draft, verdict, kept, verifier.beta).clone())

    options = {"executor": executor, "gamma": 5, "sampling": sampling, "after_round": record, "device": device,
               "policy": policy}  # fmt: skip
    return decode(LONG, rows, tables, **options), found


@pytest.fixture
def small_buckets(monkeypatch):
    """Four buckets of columns for texts of up to 60 tokens."""
    monkeypatch.setattr(buckets, "SMALLEST_BUCKET", 8)


@pytest.mark.parametrize(("rows", "temperature", "policy"), in_turn([1, 2], [(0, None), (1, VaryingGamma(5))]))
def test_no_replay_overwrites_what_is_still_read(rows, temperature, policy, tables, small_buckets):
    tokens, expected = numbers_of_rounds(PaddedEager(), tables, rows, temperature, policy)
    executor = SimulatedGraphs()
    graphs, found = numbers_of_rounds(executor, tables, rows, temperature, policy)
    assert graphs == tokens and len(found) == len(expected)
    assert all(a.equal(b) for a, b in zip(found, expected, strict=True))
    rounds = [graph for f in executor.functions.values() if "_round" in f.name for graph in f.graphs.values()]
    assert all([stage for stage, _ in graph.marks] == ["host", "draft", "verify"] for graph in rounds)
    # A round of a fixed gamma is one graph in each bucket of columns; of others the verdict is one for all buckets.
    counts = {f.name.split()[0]: len(f.graphs) for f in executor.functions.values()}
    whole = {"ModelDrafter._round": 4, "round_numbers": 1}
    assert counts == whole if policy is None else counts["accept_and_commit"] < counts["ModelDrafter._draft"]


class PaddedEager(EagerExecutor):
    """Eager mode with the shapes of graphs."""

    fixed_shapes = True


@pytest.mark.parametrize(("rows", "temperature"), in_turn([1, 2], [(0,), (1,)], [2]))
def test_results_left_in_the_pool_are_overwritten(rows, temperature, tables, small_buckets, monkeypatch):
    """Negative control: results that are not copied out of the pool, as graphs return them by default."""

    def in_the_pool(self, number, like):
        self.executor.left.append(torch.empty_like(like))
        return self.executor.left[-1]

    monkeypatch.setattr(Captured, "_buffer", in_the_pool)
    _, expected = numbers_of_rounds(PaddedEager(), tables, rows, temperature, VaryingGamma(5))
    try:
        _, found = numbers_of_rounds(SimulatedGraphs(), tables, rows, temperature, VaryingGamma(5))
    except (IndexError, RuntimeError) as error:
        assert "index" in str(error)  # a wild number was one
    else:
        assert not all(a.equal(b) for a, b in zip(found, expected, strict=True))


def columns_after_a_move(executor, tables):
    """The cache after the nodes of a path moved to the front of their tree."""
    model = tabular_model(tables.target, Sampling(), executor=executor)
    model.allocate(1, 20)
    logits_of(model, torch.arange(12)[None], [0])
    model.commit_path(torch.tensor([[2, 5, 8]]), torch.tensor([2]))
    return model.cache_tensors()[0][0, 0, :12, 0].tolist()


def test_a_capture_leaves_the_cache_as_it_is(tables, monkeypatch):
    expected = columns_after_a_move(EagerExecutor(), tables)
    assert expected == [0, 1, 4, 7, 10, 5, 6, 7, 8, 9, 10, 11]
    assert columns_after_a_move(SimulatedGraphs(), tables) == expected
    # Negative control: warm-up on the cache itself moves them more than once.
    monkeypatch.setattr(cudagraph, "stand_in_caches", lambda model: contextlib.nullcontext())
    assert columns_after_a_move(SimulatedGraphs(), tables) != expected


def plus_its_sum(x):
    """A function that asks the host."""
    try:
        return x + x.sum().item()
    except RuntimeError as error:
        raise RuntimeError("the capture was invalidated") from error


def test_a_function_that_cannot_be_captured_runs_eagerly_and_its_whole_error_is_told(tables, caplog):
    model = tabular_model(tables.target, Sampling())
    executor = model.executor = SimulatedGraphs()
    executor.forgives = True
    model.allocate(1, 20)
    logits_of(model, torch.tensor([[1, 2]]), [0])
    for _ in range(2):
        assert executor.compiled_whole(plus_its_sum, model)(torch.ones(3)).tolist() == [4] * 3
        others = executor.compiled_whole(torch.neg, model)  # are captured still
        assert others(torch.ones(3)).tolist() == [-1] * 3
    assert executor.captures == 1 and graphs_of(executor) == 1
    [(name, why)] = executor.not_captured.items()
    assert name.startswith("plus_its_sum") and "the capture was invalidated" in why and "inside a graph" in why
    assert any(name in note and "inside a graph" in note for note in executor.notes())
    assert any("inside a graph" in record.getMessage() for record in caplog.records)


def test_a_round_that_cannot_be_one_graph_is_several(tables, monkeypatch):
    def asks_the_host(self, *given, whole=ModelDrafter._round):
        found = whole(self, *given)
        assert found[-1].sum().item()
        return found

    monkeypatch.setattr(ModelDrafter, "_round", asks_the_host)
    executor = SimulatedGraphs()
    executor.forgives = True
    assert decode(jobs(), 3, tables, executor=executor) == decode(jobs(), 3, tables)
    assert len(executor.not_captured) == 1 and not executor.whole_rounds
    assert {f.name for f in executor.functions.values() if f.graphs} >= {"ModelDrafter._draft of tiny"}


def twice(x):
    return 2 * x


def selections(fixed_shapes=True, samples=True):
    """What the executor is told of a run."""
    kinds = {"cache": {"fixed_shapes": fixed_shapes}, "decoding": {"samples": samples}}
    groups = {group: SimpleNamespace(name=group, kind=SimpleNamespace(**of)) for group, of in kinds.items()}
    return groups


def test_auto_is_graphs_on_cuda_where_they_are_possible():
    settings, cuda, cpu = DefaultExecutor.Settings(), torch.device("cuda"), torch.device("cpu")

    def kind(device, **run):
        return type(DefaultExecutor.from_settings(settings, device, selections(**run)))

    assert kind(cuda) is CudaGraphExecutor and kind(cpu) is EagerExecutor
    assert kind(cuda, fixed_shapes=False) is kind(cuda, samples=False) is EagerExecutor
    executor = DefaultExecutor.from_settings(settings, cuda, selections())
    assert executor.captures_graphs
    assert executor.columns(90) == 128 and executor.lengths(90)
    executor.run_eagerly("it counts")
    assert executor.columns(90) == 90 and not executor.lengths(90) and "it counts" in executor.notes()[0]
    assert executor.compiled(twice) is twice and not executor.captures_graphs and not executor.fixed_shapes


class NoGraphs(CudaGraphExecutor):
    """Graphs that do nothing."""

    def warm_up(self, function):
        return function()

    def capture(self, function):
        return lambda: None


def rows_of(batch_size=1):
    return State.idle(batch_size, 8, [], torch.device("cpu")).rows


def test_graphs_of_rows_that_are_gone_are_dropped():
    executor, old, new = NoGraphs(), rows_of(), rows_of()
    lengths = executor.compiled(length_of)
    lengths(old)
    lengths(new)
    lengths(new)
    assert graphs_of(executor) == executor.captures == 2  # keyed by address
    del old
    lengths(rows_of(2))
    assert graphs_of(executor) == 2 and executor.captures == 3


def length_of(rows):
    return rows.length + 1


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("cache", ["static", "paged"])
@pytest.mark.parametrize("temperature", [0, 1])
def test_real_graphs_give_the_tokens_of_eager_mode(cache, temperature, tables):
    device = torch.device("cuda")
    executor = CudaGraphExecutor()
    options = {"sampling": Sampling(temperature=temperature), "device": device}
    for kind in (None, "model", "tree_distinct"):
        expected = decode(jobs(), 3, tables, cache, kind, **options)
        assert decode(jobs(), 3, tables, cache, kind, executor=executor, **options) == expected
    assert graphs_of(executor) > 0 and not executor.not_captured


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("rows", [1, 2])
def test_real_replays_overwrite_nothing_that_is_still_read(rows, temperature, tables, small_buckets):
    device = torch.device("cuda")
    tokens, expected = numbers_of_rounds(PaddedEager(), tables, rows, temperature, device=device)
    executor = CudaGraphExecutor()
    for _ in range(2):  # the second time all graphs are there
        graphs, found = numbers_of_rounds(executor, tables, rows, temperature, device=device)
        assert graphs == tokens and len(found) == len(expected)
        assert all(torch.allclose(a, b, equal_nan=True) for a, b in zip(found, expected, strict=True))
    assert not executor.not_captured
    torch.cuda.synchronize()
    marked = [[e for _, e in g.marks] for f in executor.functions.values() for g in f.graphs.values() if g.marks]
    assert marked and all(a.elapsed_time(b) > 0 for events in marked for a, b in pairwise(events))


@pytest.mark.cuda
@needs_cuda
def test_after_a_real_capture_that_failed_others_are_made(tables):
    executor, x = CudaGraphExecutor(), torch.ones(3, device="cuda")
    stream = torch.cuda.current_stream()
    for _ in range(2):
        assert executor.compiled(twice)(x).tolist() == [2] * 3
        assert executor.compiled(plus_its_sum)(x).tolist() == [4] * 3
        assert executor.compiled(torch.neg)(x).tolist() == [-1] * 3
    assert torch.cuda.current_stream() == stream and list(executor.not_captured) == ["plus_its_sum"]
    assert graphs_of(executor) == 2


def test_without_memory_for_more_graphs_those_that_are_there_stay():
    executor, capture = SimulatedGraphs(), SimulatedGraphs.capture
    executor.forgives = True
    double = executor.compiled(twice)
    assert double(torch.ones(2)).tolist() == [2, 2]
    executor.warm = True

    def full(function):
        raise torch.OutOfMemoryError("full")

    executor.capture = full
    assert double(torch.ones(3)).tolist() == [2, 2, 2] and double(torch.ones(2)).tolist() == [2, 2]
    assert graphs_of(executor) == 1 and executor.late == 1 and "after warm-up: " in executor.notes()[-1]
    executor.capture = lambda function: capture(executor, function)
    assert double(torch.ones(4)).tolist() == [2] * 4 and graphs_of(executor) == 1  # it is not tried again
