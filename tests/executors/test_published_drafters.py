"""Drafters that read hidden states of several layers, as compiled programs: the tokens of eager mode."""

import json
from functools import partial
from pathlib import Path

import pytest
from published_cases import CHECKPOINTS, dflash, eagle3, peagle, written
from small_runs import parts_of
from torch import nn

from specbench.executors.packed_linear import PackedLinear
from specbench.run.run import run

OTHERS = {"eagle3": eagle3, "peagle": peagle}


def texts(folder: Path) -> list[str]:
    return [json.loads(line)["output"] for line in (folder / "prompts.jsonl.part").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "temperature"), [
    ("eagle3", 0), ("z-lab", 0), *((kind, 1) for kind in ("eagle3", "peagle", "z-lab", "speculators", "dspark")),
])  # fmt: skip
def test_programs_write_the_tokens_of_eager_mode(kind, temperature, traced, monkeypatch, tmp_path):
    """Programs are traced and not compiled; all are there before anything is timed. Control: another seed. Most of
    a test's time is the trace of the target, in three of its nine programs."""
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    published = "eagle3" if "eagle" in kind else "dflash"
    monkeypatch.setitem(CHECKPOINTS, published, OTHERS.get(kind, partial(dflash, kind)))
    words = [*written(published, tmp_path / "drafter"), f"temperature={temperature}",
             "gamma=3", "batch_size=2", "data.limit=2", "max_new_tokens=8", "verdict_tokens=0"]  # fmt: skip
    ways = {"eager": ["executor=eager"], "compiled": ["executor=compiled"]}
    ways |= {"control": ["executor=eager", "seed=1"]} if temperature else {}
    for name, more in ways.items():
        result, _ = run(parts_of(*words, *more), tmp_path / name)
        assert result.counts.drafted > 0 and not result.counts.failed
        if name == "compiled":
            programs = result.executor["programs"]
            assert programs["made"] == len(traced) > 3 and programs["missed"] == 0
    assert texts(tmp_path / "compiled") == texts(tmp_path / "eager")
    assert temperature == 0 or texts(tmp_path / "control") != texts(tmp_path / "eager")


def network(drafter) -> nn.Module:
    """The part of a drafter that is read from a checkpoint."""
    if hasattr(drafter, "pairs"):
        return drafter.pairs.module
    if hasattr(drafter, "heads"):
        return drafter.heads
    return drafter.speculator if hasattr(drafter, "speculator") else drafter.model.module


@pytest.mark.slow  # tests/executors/test_products.py packs other modules
@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_their_linear_layers_have_the_targets_products(kind, tmp_path):
    """Results are those of eager mode, up to rounding, and so are the numbers of weights and operations."""
    words = [*written(kind, tmp_path / "drafter"), "temperature=1", "gamma=2", "data.limit=2", "max_new_tokens=8",
             "verdict_tokens=0"]  # fmt: skip
    result, drafters = {}, {}
    for executor in ("eager", "auto"):
        parts = parts_of(*words, f"executor={executor}")
        drafters[executor] = parts.drafter
        result[executor], _ = run(parts, tmp_path / executor)
    layers = list(network(drafters["auto"]).modules())
    assert not [layer for layer in layers if type(layer) is nn.Linear]
    assert len([layer for layer in layers if isinstance(layer, PackedLinear)]) > 2
    assert result["auto"].alpha.mean == pytest.approx(result["eager"].alpha.mean, abs=1e-4)
    assert texts(tmp_path / "auto") == texts(tmp_path / "eager")
    eager = drafters["eager"].operations_per_token
    assert drafters["auto"].operations_per_token == pytest.approx(eager) and eager > 0
