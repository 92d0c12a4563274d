"""Other engines as peers (experiments/peers): the workers' protocol and the baseline class, with made-up workers."""

import importlib.util
import sys
from pathlib import Path
from shutil import copytree

import pytest
from small_runs import parts_of

from specbench.decoding.state import Job
from specbench.results.parquet import load_sums
from specbench.results.writer import write_result
from specbench.run.pooled import pooled
from specbench.run.run import run

PEERS = Path(__file__).resolve().parents[2] / "experiments" / "peers"
WORKER = f"""
import os, sys
sys.path.insert(0, {str(PEERS)!r})
from protocol import serve

def repeat(request):
    print("a library's own words")
    return [request["ids"][-1]] * request["new"], request["new"] - 1, 0.5

def refuse(request):
    raise ValueError("no such\\nmode")

def load(args):
    assert args.gamma == 4 and args.precision in ("f32", "q8_0")
    assert (args.target_name, args.drafter_name) == ("target", "drafter")
    return MODES, "an engine 1.0"
"""
WORKERS = {
    "repeats": 'MODES = {"plain": repeat, "draft": repeat, "lookup": refuse}\nserve(load)',
    "ends": 'MODES = {"plain": lambda request: os._exit(3) if request["new"] == 12 else repeat(request)}\nserve(load)',
    "broken": "os._exit(5)",
    "unfit": 'MODES = {"plain": refuse}\nserve(load)',
}


@pytest.fixture
def engines(tmp_path, monkeypatch):
    """The module, with engines whose workers are those above."""
    for name, modes in WORKERS.items():
        (tmp_path / f"worker_{name}.py").write_text(WORKER + modes)
    monkeypatch.syspath_prepend(str(PEERS))
    engines = importlib.import_module("engines")
    monkeypatch.setattr(engines, "HERE", tmp_path)
    return engines


def test_an_answer_has_the_tokens_and_an_error_is_one_sentence(engines, tmp_path):
    worker = engines.start("repeats", tmp_path, "q8_0", 4)
    assert (worker.modes, worker.version) == (["plain", "draft", "lookup"], "an engine 1.0")
    job = Job([4, 9], 5, 1)
    output = engines.WorkerMode(worker, "plain", 0.0, [0]).decode(job)
    assert (output.tokens, output.decoded, output.decode_seconds) == ([9, 9, 9], 2, 0.5)
    with pytest.raises(RuntimeError, match=r"^repeats in q8_0: ValueError: no such mode$"):
        engines.WorkerMode(worker, "lookup", 0.0, [0]).decode(job)
    assert engines.WorkerMode(worker, "draft", 0.0, [0]).decode(job).tokens == [9, 9, 9]  # it goes on
    worker.stop()
    assert worker.process.returncode == 0


def test_a_worker_that_ends_is_told_in_one_sentence_each_time(engines, tmp_path):
    mode = engines.WorkerMode(engines.start("ends", tmp_path, "f32", 4), "plain", 1.0, [0])
    mode.decode(Job([4], 5, 1))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^ends in f32 ended with exit code 3, see .*worker-ends-f32.log$"):
            mode.decode(Job([4], 13, 1))


def test_a_run_has_the_engines_that_work_and_counts_equal_texts(engines, tmp_path, monkeypatch):
    told: list[str] = []
    monkeypatch.setattr(engines.log, "warning", lambda text, *values: told.append(text % values))
    settings = {
        "engines": "[repeats:q8_0,broken,unfit,transformers]",
        "folder": tmp_path,
        "texts": tmp_path / "texts.jsonl",
    }
    parts = parts_of("baseline._target_=engines.Engines", "temperature=0", "dtype=float32",
                     *(f"+baseline.{name}={value}" for name, value in settings.items()))  # fmt: skip
    told = [text for text in told if "left out" in text]
    assert len(told) == 3 and "lookup of repeats in q8_0: ValueError" in told[0]
    assert "broken in f32 ended with exit code 5" in told[1] and "plain of unfit" in told[2]
    result, record = run(parts, tmp_path)
    write_result(result, record, "digest", tmp_path, parts.target.tokenizer)
    assert {*result.speedup_over} == {
        "repeats_q8_0_plain",
        "repeats_q8_0_draft",
        "generate",
        "assisted",
        "prompt_lookup",
    }
    assert result.throughput["repeats_q8_0_draft_tokens_per_second"] == 22
    again = pooled([result.as_dict()] * 3, lambda: [load_sums(tmp_path)] * 3)
    assert again["throughput"] == pytest.approx(result.throughput)
    for name, over in result.speedup_over.items():
        assert again["speedup_over"][name]["measured"] == pytest.approx(over.measured)

    rows = {row["engine"]: row for row in made(tmp_path)}
    assert [*rows] == ["specbench", "repeats", "transformers"]
    assert rows["transformers"]["draft_equal"] == rows["specbench"]["draft_equal"] == result.counts.prompts == 2
    assert rows["repeats"]["plain_equal"] == rows["repeats"]["draft_equal"] == 0
    assert rows["repeats"]["version"] == "an engine 1.0" and rows["repeats"]["precision"] == "q8_0"
    assert rows["repeats"]["over_best"] == pytest.approx(result.speedup_over["repeats_q8_0_plain"].measured)
    plain = result.throughput["baseline_tokens_per_second"] / 22
    assert rows["repeats"]["plain_over_plain"] == pytest.approx(plain)


def made(folder: Path) -> list[dict]:
    """The rows that make.py collects from a run."""
    spec = importlib.util.spec_from_file_location("peers_make", PEERS / "make.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["peers_make"] = module
    spec.loader.exec_module(module)
    return module.collect([str(folder)]).rows


def test_other_checkpoints_have_names_of_their_own(engines, tmp_path, monkeypatch):
    """The pair of a run with no overrides is the shipped one; a lookup leaves the target alone."""
    checkpoints = importlib.import_module("converted")
    assert tuple(checkpoints.folders([])) == engines.PAIR
    other = copytree(engines.PAIR[0], tmp_path / "models--me--other" / "snapshots" / "0123456789abcdef")
    found = checkpoints.folders(["target=model", f"target.path={other}", "drafter=prompt_lookup"])
    assert found == [other] and checkpoints.name_of(other) == "models--me--other-0123456789ab"
    (tmp_path / "worker_alone.py").write_text((WORKER + WORKERS["repeats"]).replace(
        '("target", "drafter")', '("models--me--other-0123456789ab", None)'))  # fmt: skip
    assert engines.start("alone", tmp_path, "f32", 4, found).modes == ["plain", "draft", "lookup"]
    with pytest.raises(RuntimeError, match="AssertionError"):  # the drafter's name where there is none
        engines.start("repeats", tmp_path, "f32", 4, found)


def test_what_other_engines_cannot_do_is_refused(engines, tmp_path):
    chosen = ("baseline._target_=engines.Engines", "+baseline.engines=[]", f"+baseline.folder={tmp_path}",
              f"+baseline.texts={tmp_path / 'texts.jsonl'}")  # fmt: skip
    for override, why in (("top_k=5", "top_k, top_p"), ("batch_size=2", "choose batch_size=1")):
        with pytest.raises(engines.ConfigError, match=why):
            parts_of(*chosen, override)
