"""Whole runs on simulated graphs (`graph_memory.py`): every graph is there before anything is timed."""

import json

import pytest
from conftest import parts_of

from specbench.executors import buckets
from specbench.executors.cudagraph import CudaGraphExecutor
from specbench.run.run import run

GRAPHS = ("executor=cudagraph", "executor._target_=graph_memory.SimulatedGraphs", "executor.compile=false")
KINDS = {
    "fixed": ("gamma=3",),
    "greedy": ("gamma=3", "temperature=0", "batch_size=2"),
    "tree": ("gamma=4", "drafter=tree", "verifier=iterative"),
    "medusa": ("gamma=3", "drafter=medusa", "temperature=0"),
    "adaptive": ("gamma_policy=adaptive", "gamma_policy.largest=4"),
    "heuristic": ("gamma_policy=heuristic", "gamma=2", "gamma_policy.largest=4"),
    "entropy": ("gamma_policy=entropy", "gamma_policy.largest=4", "batch_size=2"),
    "no more evidence": ("gamma=3", "verdict_tokens=60"),
    "paged": ("gamma=3", "cache=paged", "batch_size=2"),
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> str:
    """Prompts of different lengths, the shortest of one token."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": text}) for text in ("x", "x = 1\n" * 9 + "def f(a):", "if")))
    return str(path)


def tokens_of(record):
    return [[r.speculative.tokens, r.baseline.tokens] for r in record.results]


@pytest.mark.parametrize("kind", KINDS)
def test_no_graph_is_captured_after_warm_up(kind, texts, monkeypatch, tmp_path):
    monkeypatch.setattr(buckets, "SMALLEST_BUCKET", 16)
    common = ("data.limit=3", "data=jsonl", f"data.path={texts}", *KINDS[kind])
    parts = parts_of(*GRAPHS, *common)
    result, record = run(parts, tmp_path)
    assert result.counts.failed == 0 and result.executor["captures"] >= result.executor["graphs"] > 3
    assert result.executor["captures_after_warm_up"] == 0
    assert not any("CUDA graphs" in note for note in result.notes)
    if not parts.policy.calibrated:  # whose choices depend on times
        _, expected = run(parts_of("executor=eager", *common), tmp_path / "eager")
        assert tokens_of(record) == tokens_of(expected)
