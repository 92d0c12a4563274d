"""Whole runs: every graph is captured before anything is timed. Graphs run their function again instead of a replay."""

import json

import pytest
from graph_memory import Rerun, graphs_of
from small_runs import noisy_drafter, parts_of, run

import specbench.run.session
from specbench.executors import pytree as buckets

KINDS = {
    # The second prompt is not read again: rounds leave less behind.
    "fixed": ("gamma=2", "verdict_tokens=1", "max_new_tokens=14"),
    "two rows": ("gamma=2", "temperature=0", "batch_size=2", "cache=paged", "max_new_tokens=6"),
    "optimal": ("gamma_policy=optimal", "gamma_policy.largest=2", "max_new_tokens=6"),
    "adaptive": ("gamma_policy=adaptive", "gamma_policy.largest=2", "max_new_tokens=6"),
    "tree": (
        "drafter=dynamic_tree",
        f"drafter.path={noisy_drafter()}",
        "target.path=shipped:drafter",
        "drafter.nodes=6",
        "temperature=1",
        "gamma=2",
    ),
}


class OneWidth(Rerun):
    """Negative control: warm-up meets only the shortest texts."""

    def lengths(self, columns):
        return super().lengths(columns)[-1:]


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> str:
    """Prompts of different lengths, the shortest of one token."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": text}) for text in ("x", "x = 1\n" * 6 + "def f(a):")))
    return str(path)


def notes_and_executor(kind, executor, texts, monkeypatch, tmp_path):
    """The notes of a run without failures, and its executor."""
    monkeypatch.setattr(buckets, "SMALLEST_BUCKET", 32)
    monkeypatch.setattr(specbench.run.session, "CALIBRATION_TOKENS", 6)
    graphs = ("executor=cudagraph", f"executor._target_={executor}")
    parts = parts_of(*graphs, "data.limit=2", "data=jsonl", f"data.path={texts}", *KINDS[kind])
    results = run(parts, tmp_path)[0]
    assert results.counts.failed == 0
    return results.notes, parts.target.executor


@pytest.mark.parametrize("kind", [
    kind if kind == "adaptive" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS
])  # fmt: skip
def test_no_graph_is_captured_after_warm_up(kind, texts, monkeypatch, tmp_path):
    notes, executor = notes_and_executor(kind, "graph_memory.Rerun", texts, monkeypatch, tmp_path)
    assert executor.captures >= graphs_of(executor) > 3 and executor.late == 0 and not executor.not_captured
    assert not any("CUDA graphs" in note for note in notes)


def test_captures_after_warm_up_are_reported(texts, monkeypatch, tmp_path):
    notes, executor = notes_and_executor("fixed", "test_graph_runs.OneWidth", texts, monkeypatch, tmp_path)
    assert executor.late > 0 and any(f"CUDA graphs captured after warm-up: {executor.late};" in n for n in notes)
