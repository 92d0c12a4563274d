"""Metrics of a round: what they count, and where it is shown."""

import json

import pyarrow.parquet
import pytest
import torch
from conftest import V, make_drafter, parts_of, tabular_model, verifier_of

from specbench.decoding.clock import Lap, Stopwatch
from specbench.decoding.sampling import Sampling
from specbench.decoding.speculative import decode_speculative
from specbench.decoding.state import Job, State
from specbench.gamma_policies.fixed import FixedGamma
from specbench.measure.recorder import Recorder
from specbench.metrics.calibration import Calibration
from specbench.report.run_table import run_table
from specbench.report.tables import multirun_rows
from specbench.run.run import run
from specbench.storage.write import write_result
from specbench.verifiers.iterative import IterativeVerifier
from specbench.verifiers.speculative import SpeculativeVerifier


def calibration(tables, text, kind, verifier=SpeculativeVerifier, drafter_table=None, bins=5):
    """The metric's numbers, the rounds, and q(x) of each guess that the verifier tried, found on the way."""
    sampling, rows = Sampling(), 50
    target = tabular_model(tables.target, sampling)
    helper = tabular_model(tables.similar if drafter_table is None else drafter_table, sampling)
    drafter = make_drafter(kind, target, text, helper)
    state = State.start([Job([3, 7, row % V], 30, row) for row in range(rows)], [], 40, target.device)
    target.allocate(rows, state.tokens.shape[1])
    target.prefill(state)
    metric, judge, clock, tried = Calibration(bins), verifier_of(verifier, sampling), Stopwatch(target.device), []
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


def test_a_tree_is_counted_along_its_path(tables):
    found, rounds, _ = calibration(tables, "", "tree_distinct", IterativeVerifier)
    assert found["accepted"] == pytest.approx(sum(r.accepted for r in rounds) / sum(r.tested for r in rounds))


def test_nothing_drafted_has_no_numbers():
    assert Calibration(3).of_run([[(0.0,) * 9]]) == {"mean_q": None, "accepted": None, "error": None}


def test_a_metric_is_in_every_file_and_table(tmp_path):
    parts = parts_of("metric=calibration", "metrics.calibration.bins=2", "max_new_tokens=24")
    result, record = run(parts, tmp_path)
    write_result(result, record, "digest", tmp_path, parts.target.tokenizer)
    stored = json.loads((tmp_path / "results.json").read_text())
    rounds = pyarrow.parquet.read_table(tmp_path / "rounds.parquet").to_pylist()
    assert sum(r["calibration_guesses_0"] + r["calibration_guesses_1"] for r in rounds) == stored["counts"]["tested"]
    assert stored["metrics"]["calibration"]["accepted"] == pytest.approx(stored["alpha_counted"]["mean"])
    assert multirun_rows([([], stored)])[0]["calibration/error"] == stored["metrics"]["calibration"]["error"]
    cells = run_table(stored, tmp_path).renderables[0].columns[0]._cells
    assert cells.count("calibration") == 3
    assert torch.isfinite(torch.tensor(list(stored["metrics"]["calibration"].values()))).all()
