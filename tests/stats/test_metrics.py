"""Metrics of a round: what they count, and where it is shown."""

import json
from dataclasses import replace

import pyarrow.parquet
import pytest
import torch
from choosing import only
from decoder_cases import V, make_drafter, tabular_model, verifier_of
from random_cases import random_bits
from rich.console import Console
from small_runs import composed, parts_of, small
from tree_cases import BY_ROW, p_of, random_tree

from specbench.config.validate import check
from specbench.decoding.sampling import Sampling
from specbench.decoding.sequence import Sequence
from specbench.decoding.speculative import decode_speculative
from specbench.decoding.state import State
from specbench.decoding.timer import Lap, Timer
from specbench.decoding.token_tree import MISSING, ROOT
from specbench.decoding.verify_tree import accepted_path, iterative_sampling
from specbench.errors import ConfigError
from specbench.policies.fixed import FixedGamma
from specbench.results.run_table import run_table
from specbench.results.sweep_table import multirun_rows
from specbench.results.writer import write_result
from specbench.run.recorder import Recorder
from specbench.run.run import run
from specbench.stats.metrics.calibration import Calibration
from specbench.verifiers.iterative import IterativeVerifier
from specbench.verifiers.speculative import SpeculativeVerifier


def started(target, jobs):
    """A state whose prompts were read."""
    state = State.start(jobs, [], 40, target.device)
    target.allocate(len(jobs), state.tokens.shape[1])
    target.prefill(state)
    return state


def calibration(tables, text, kind, verifier=SpeculativeVerifier, drafter_table=None, bins=5):
    """The metric's numbers, the rounds, and q(x) of each guess that the verifier tried, found on the way."""
    sampling, rows = Sampling(), 50
    target = tabular_model(tables.target, sampling)
    helper = tabular_model(tables.similar if drafter_table is None else drafter_table, sampling)
    drafter = make_drafter(kind, target, text, helper)
    state = started(target, [Sequence([3, 7, row % V], 30, row) for row in range(rows)])
    metric, judge, clock, tried = Calibration(bins), verifier_of(verifier, sampling), Timer(target.device), []
    recorder = Recorder(judge, {"calibration": metric})

    def watch(state, scores, draft, verdict, kept):
        recorder(state, scores, draft, verdict, kept)
        for row in range(rows):
            for i in range(min(int(verdict.accepted[row]) + 1, int(draft.count[row]), int(kept[row]))):
                tried.append(1.0 if draft.probs is None else float(draft.probs[row, i, draft.tokens[row, i]]))

    decode_speculative(state, target, drafter, FixedGamma(3), judge, clock, watch)
    rounds = [r for call in recorder.rounds([laps for laps in clock.rounds() if Lap.VERIFY in laps]) for r in call]
    return metric.of_run([[r.numbers["calibration"] for r in rounds]]), rounds, tried


@pytest.mark.parametrize("kind", ["model", "random", "ngram", "bigram"])
def test_calibration_counts_every_tested_guess_once(kind, tables, number_text):
    found, rounds, tried = calibration(tables, number_text, kind)
    tested = sum(r.tested for r in rounds)
    assert len(tried) == tested > 300
    assert found["mean_q"] == pytest.approx(sum(tried) / tested, rel=1e-5)
    assert found["accepted"] == pytest.approx(sum(r.accepted for r in rounds) / tested)
    assert abs(found["mean_q"] - found["accepted"]) <= found["error"] + 1e-9


def test_a_drafter_that_is_the_target_is_underconfident(tables):
    """Every guess is accepted, however small its q: the error is 1 - mean q."""
    found, _, _ = calibration(tables, "", "model", drafter_table=tables.target)
    assert found["accepted"] == 1 and found["error"] == pytest.approx(1 - found["mean_q"])
    assert Calibration(3).of_run([[(0.0,) * 9]]) == dict.fromkeys(found)  # nothing was drafted


def test_a_tree_is_counted_along_its_path(tables):
    found, rounds, _ = calibration(tables, "", "tree_distinct", IterativeVerifier)
    assert found["accepted"] == pytest.approx(sum(r.accepted for r in rounds) / sum(r.tested for r in rounds))


@pytest.mark.slow
def test_a_metric_is_in_every_file_and_table(tmp_path):
    parts = parts_of("metric=calibration", "metrics.calibration.bins=2", "max_new_tokens=24")
    result, record = run(parts, tmp_path)
    write_result(result, record, "digest", tmp_path, parts.target.tokenizer)
    stored = json.loads((tmp_path / "results.json").read_text())
    rounds = pyarrow.parquet.read_table(tmp_path / "rounds.parquet").to_pylist()
    assert sum(r["calibration_guesses_0"] + r["calibration_guesses_1"] for r in rounds) == stored["counts"]["tested"]
    assert stored["metrics"]["calibration"]["accepted"] == pytest.approx(stored["alpha_counted"]["mean"])
    assert multirun_rows([([], stored)])[0]["calibration/error"] == stored["metrics"]["calibration"]["error"]
    console = Console(width=120)
    with console.capture() as captured:
        console.print(run_table(stored, tmp_path))
    assert [line.split()[0] for line in captured.get().splitlines() if line.strip()].count("calibration") == 3
    assert torch.isfinite(torch.tensor(list(stored["metrics"]["calibration"].values()))).all()


@pytest.mark.parametrize("name", only(["wide"], [BY_ROW, "wide"]))
def test_what_was_tried_along_a_path_is_what_its_text_says(name):
    """Rows have trees of their own in which some nodes say the same: one step per guess, found from the texts alone."""
    p_table, draft, generator = random_tree(name, 5, repeats=True)
    bits = random_bits((len(draft.tokens), draft.depth + 1), generator)
    r = torch.rand(draft.tokens.shape, generator=generator, dtype=torch.float64)
    verdict = iterative_sampling(p_of(p_table, draft), draft, r, bits)
    entries, first, steps = accepted_path(draft, verdict)
    parents = draft.parents.expand(len(draft.tokens), -1).tolist()
    for row, parent in enumerate(parents):
        texts = {ROOT: ()}
        for i, above in enumerate(parent[: int(draft.count[row])], 1):
            if above != MISSING:
                texts[i] = (*texts[above], int(draft.tokens[row, i - 1]))
        n = int(verdict.accepted[row])
        accepted = tuple(verdict.tokens[row, :n].tolist())
        children = [[i for i in texts if i and texts[parent[i - 1]] == accepted[:k]] for k in range(n + 1)]
        assert [texts[e] for e in entries[row, : n + 1].tolist()] == [accepted[:k] for k in range(n + 1)]
        assert int(steps[row]) == sum(1 for found in children if found)
        for k in range(int(steps[row])):
            assert int(first[row, k]) == children[k][0] - 1


class OneColumn(Calibration):
    """A metric that names one number."""

    def __init__(self, count):
        super().__init__(1)
        self.columns, self.count = ("one",), count

    def of_round(self, path):
        return path.kept[:, None].double().expand(-1, self.count)

    def of_run(self, requests):
        return {"one": 1 / 0}


def test_a_metric_with_more_numbers_than_columns_is_refused(tables):
    target = tabular_model(tables.target, Sampling())
    state = started(target, [Sequence([3, 7, 1], 9, 0)])
    judge = verifier_of(SpeculativeVerifier, Sampling())
    drafter = make_drafter("random", target, "")
    recorder = Recorder(judge, {"one": OneColumn(2)})
    with pytest.raises(ValueError, match=r"OneColumn\.of_round returned a tensor of shape \(1, 2\)"):
        decode_speculative(state, target, drafter, FixedGamma(2), judge, Timer(target.device), recorder)


def test_a_metric_may_refuse_other_choices(monkeypatch):
    monkeypatch.setattr(Calibration, "refuses", classmethod(lambda cls, settings, run: f"with {run.batch_size} rows"))
    with pytest.raises(ConfigError, match=r"metric=calibration is not possible with 3 rows"):
        check(composed(*small("metric=[calibration]", "batch_size=3")))


def test_an_error_in_a_metric_does_not_lose_the_run(tmp_path):
    parts = replace(parts_of(), metrics={"one": OneColumn(1), "calibration": Calibration(2)})
    result, _ = run(parts, tmp_path)
    assert result.metrics["one"] == {} and result.metrics["calibration"]["accepted"] is not None
    assert any("metric one has no numbers: ZeroDivisionError" in note for note in result.notes)
