"""The graph executor. Without a GPU it is tested on a model of graphs and of their memory (`graph_memory.py`)."""

import contextlib

import pytest
import torch
from conftest import TREES, tabular_model, verifier_of
from graph_memory import SimulatedGraphs
from test_law import learning_policy
from test_queue import decode, jobs

from specbench.decoding import verify_tree
from specbench.decoding.sampling import Sampling
from specbench.decoding.speculative import accept_and_commit
from specbench.decoding.state import Job
from specbench.executors import buckets, cudagraph
from specbench.executors.cudagraph import Captured, CudaGraphExecutor
from specbench.executors.eager import EagerExecutor
from specbench.gamma_policies.entropy import EntropyGamma
from specbench.measure.recorder import round_numbers
from specbench.verifiers.speculative import SpeculativeVerifier


@pytest.mark.parametrize("cache", ["static", "paged"])
@pytest.mark.parametrize("sampling", [
    Sampling(), Sampling(temperature=0), Sampling(temperature=0.7, top_k=5, top_p=0.9, repetition_penalty=1.3),
], ids=["sampled", "greedy", "warped"])  # fmt: skip
@pytest.mark.parametrize("kind", [None, "model"])
def test_graphs_change_no_token_and_never_wait_for_the_host(cache, sampling, kind, tables):
    expected = decode(jobs(), 3, tables, cache, kind, sampling=sampling)
    executor = SimulatedGraphs()
    assert decode(jobs(), 3, tables, cache, kind, sampling=sampling, executor=executor) == expected
    names = sorted(getattr(f, "__name__", "") for f in executor.functions)
    assert names == (["_draft"] if kind else []) + ["_score_draft", "accept_and_commit"]
    assert executor.replays > executor.graphs > 0


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0)], ids=["sampled", "greedy"])
@pytest.mark.parametrize(
    "kind", [*TREES, "blockwise", "pass_lookahead", "non_autoregressive", "early_exit", "under_under_model"]
)
def test_graphs_change_no_token_of_other_drafts(kind, sampling, tables, monkeypatch):
    expected = decode(jobs(), 3, tables, kind=kind, sampling=sampling)
    monkeypatch.setattr(verify_tree, "nobody", lambda mask: False)  # as on a GPU
    executor = SimulatedGraphs()
    assert decode(jobs(), 3, tables, kind=kind, sampling=sampling, executor=executor) == expected
    assert executor.replays > executor.graphs > 0


@pytest.mark.parametrize("signal", ["entropy", "confidence"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0)], ids=["sampled", "greedy"])
def test_graphs_change_no_token_of_drafts_that_end_early(signal, sampling, tables):
    def policy():
        return learning_policy(EntropyGamma, largest=4, signal=signal)

    expected = decode(jobs(), 3, tables, sampling=sampling, policy=policy())
    executor = SimulatedGraphs()
    assert decode(jobs(), 3, tables, sampling=sampling, policy=policy(), executor=executor) == expected
    assert "_step" in {getattr(f, "__name__", "") for f in executor.functions} and executor.replays > executor.graphs


LONG = [Job([1, 2], 50, 7), Job([3], 44, 9)]  # from the first bucket of columns to the last


def numbers_of_rounds(executor, tables, rows, temperature, gamma=5, cache="static"):
    """Tokens, and what the recorder computes in each round, of a pair in several buckets of columns."""
    sampling, found = Sampling(temperature=temperature), []
    verifier, reduce = verifier_of(SpeculativeVerifier, sampling), executor.leaf(round_numbers)

    def record(state, scores, draft, verdict, kept):
        found.append(reduce(scores.p, draft, verdict, kept, verifier.beta, (), True).clone())

    options = {"executor": executor, "gamma": gamma, "sampling": sampling, "after_round": record}
    return decode(LONG, rows, tables, cache, **options), found


@pytest.fixture
def small_buckets(monkeypatch):
    """Four buckets of columns for texts of up to 60 tokens."""
    monkeypatch.setattr(buckets, "SMALLEST_BUCKET", 8)


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("rows", [1, 2])
def test_no_replay_overwrites_what_is_still_read(rows, temperature, tables, small_buckets):
    tokens, expected = numbers_of_rounds(PaddedEager(), tables, rows, temperature)
    executor = SimulatedGraphs()
    graphs, found = numbers_of_rounds(executor, tables, rows, temperature)
    assert graphs == tokens and len(found) == len(expected)
    assert all(a.equal(b) for a, b in zip(found, expected, strict=True))
    # Captured with the first bucket and met in all: a round with a draft, and one without.
    assert len(executor.functions[accept_and_commit].graphs) <= 2
    assert sum(len(f.graphs) for f in executor.functions.values() if f.models) >= 8  # the draft and the score, each


class PaddedEager(EagerExecutor):
    """Eager mode with the shapes of graphs."""

    fixed_shapes = True


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("rows", [1, 2])
def test_results_left_in_the_pool_are_overwritten(rows, temperature, tables, small_buckets, monkeypatch):
    """Negative control: results that are not copied out of the pool, as graphs return them by default."""

    def in_the_pool(self, number, like):
        self.executor.left.append(torch.empty_like(like))
        return self.executor.left[-1]

    monkeypatch.setattr(Captured, "_buffer", in_the_pool)
    _, expected = numbers_of_rounds(PaddedEager(), tables, rows, temperature)
    try:
        _, found = numbers_of_rounds(SimulatedGraphs(), tables, rows, temperature)
    except (IndexError, RuntimeError) as error:
        assert "index" in str(error)  # a wild number was one
    else:
        assert not all(a.equal(b) for a, b in zip(found, expected, strict=True))


def test_warm_up_on_the_cache_itself_would_move_its_columns_again(tables, monkeypatch):
    """Negative control: of a capture that does not leave the cache as it was."""
    expected = decode(jobs(), 3, tables, kind="tree_distinct")
    monkeypatch.setattr(verify_tree, "nobody", lambda mask: False)  # as on a GPU
    monkeypatch.setattr(cudagraph, "stand_ins", lambda models: contextlib.nullcontext())
    assert decode(jobs(), 3, tables, kind="tree_distinct", executor=SimulatedGraphs()) != expected


def test_a_capture_that_asks_the_host_is_noticed(tables):
    """Negative control: `.item()` in a phase."""
    model = tabular_model(tables.target, Sampling())
    model.executor = SimulatedGraphs()
    model.allocate(1, 20)
    model.logits(torch.tensor([[1, 2]]), [0])
    phase = model.executor.phase(lambda x: x + x.sum().item(), model)
    with pytest.raises(RuntimeError, match="inside a graph"):
        phase(torch.ones(3))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("cache", ["static", "paged"])
@pytest.mark.parametrize("temperature", [0, 1])
def test_real_graphs_give_the_tokens_of_eager_mode(cache, temperature, tables):
    device = torch.device("cuda")
    executor = CudaGraphExecutor()
    options = {"sampling": Sampling(temperature=temperature), "device": device}
    for kind in (None, "model"):
        expected = decode(jobs(), 3, tables, cache, kind, **options)
        assert decode(jobs(), 3, tables, cache, kind, executor=executor, **options) == expected
    assert executor.graphs > 0 and executor.bytes() > 0
