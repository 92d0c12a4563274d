"""The graph executor. Without a GPU its bookkeeping is tested on a stand-in for the graph, which
re-runs the captured function on the same buffers and refuses what a real capture refuses."""

import pytest
import torch
from conftest import TREES, tabular_model
from test_law import learning_policy
from test_queue import decode, jobs
from torch.utils._python_dispatch import TorchDispatchMode

from specbench.decoding import verify_tree
from specbench.decoding.sampling import Sampling
from specbench.executors.cudagraph import CudaGraphExecutor
from specbench.gamma_policies.entropy import EntropyGamma

HOST = ("_local_scalar_dense", "item", "nonzero", "lift_fresh", "is_nonzero", "_unique2", "masked_select")


class NoHost(TorchDispatchMode):
    """Raises where a capture would: values that travel to the host, or from it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in HOST:
            raise RuntimeError(f"{func} inside a graph")
        return func(*args, **(kwargs or {}))


class Rerun(CudaGraphExecutor):
    """A graph that is run again instead of replayed."""

    def __init__(self, max_graphs=64):
        super().__init__(max_graphs)
        self.replays = 0

    def warm_up(self, function):
        function()

    def capture(self, function):
        def replay():
            self.replays += 1
            with self.whole(), NoHost():
                found = function()
            for old, new in zip(flat(outputs), flat(found), strict=True):
                old.copy_(new)

        with NoHost():
            outputs = function()
        return replay, outputs


def flat(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if value is None:
        return []
    return [t for entry in (value if isinstance(value, tuple) else vars(value).values()) for t in flat(entry)
            if isinstance(entry, (torch.Tensor, tuple)) or hasattr(entry, "__dict__")]  # fmt: skip


@pytest.mark.parametrize("cache", ["static", "paged"])
@pytest.mark.parametrize("sampling", [
    Sampling(), Sampling(temperature=0), Sampling(temperature=0.7, top_k=5, top_p=0.9, repetition_penalty=1.3),
], ids=["sampled", "greedy", "warped"])  # fmt: skip
@pytest.mark.parametrize("kind", [None, "model"])
def test_graphs_change_no_token_and_never_wait_for_the_host(cache, sampling, kind, tables):
    expected = decode(jobs(), 3, tables, cache, kind, sampling=sampling)
    executor = Rerun()
    assert decode(jobs(), 3, tables, cache, kind, sampling=sampling, executor=executor) == expected
    names = sorted(getattr(f, "__name__", "") for f in executor.phases)
    assert names == (["_draft"] if kind else []) + ["_score_draft", "accept_and_commit"]
    assert executor.replays > executor.graphs > 0


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0)], ids=["sampled", "greedy"])
@pytest.mark.parametrize(
    "kind", [*TREES, "blockwise", "pass_lookahead", "non_autoregressive", "early_exit", "under_under_model"]
)
def test_graphs_change_no_token_of_other_drafts(kind, sampling, tables, monkeypatch):
    expected = decode(jobs(), 3, tables, kind=kind, sampling=sampling)
    monkeypatch.setattr(verify_tree, "nobody", lambda mask: False)  # as on a GPU
    executor = Rerun()
    assert decode(jobs(), 3, tables, kind=kind, sampling=sampling, executor=executor) == expected
    assert executor.replays > executor.graphs > 0


@pytest.mark.parametrize("signal", ["entropy", "confidence"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0)], ids=["sampled", "greedy"])
def test_graphs_change_no_token_of_drafts_that_end_early(signal, sampling, tables):
    def policy():
        return learning_policy(EntropyGamma, largest=4, signal=signal)

    expected = decode(jobs(), 3, tables, sampling=sampling, policy=policy())
    executor = Rerun()
    assert decode(jobs(), 3, tables, sampling=sampling, policy=policy(), executor=executor) == expected
    assert "_step" in {getattr(f, "__name__", "") for f in executor.phases} and executor.replays > executor.graphs


def test_memory_is_bounded_by_the_number_of_graphs(tables):
    expected = decode(jobs(), 3, tables)
    executor = Rerun(max_graphs=2)
    assert decode(jobs(), 3, tables, executor=executor) == expected
    assert executor.graphs == 2


def test_a_capture_that_asks_the_host_is_noticed(tables):
    """Negative control: `.item()` in a phase."""
    model = tabular_model(tables.target, Sampling())
    model.executor = Rerun()
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
    executor = CudaGraphExecutor(max_graphs=64)
    options = {"sampling": Sampling(temperature=temperature), "device": device}
    for kind in (None, "model"):
        expected = decode(jobs(), 3, tables, cache, kind, **options)
        assert decode(jobs(), 3, tables, cache, kind, executor=executor, **options) == expected
    assert executor.graphs > 0 and executor.bytes() > 0
