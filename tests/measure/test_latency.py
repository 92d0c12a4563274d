"""Waits, drift and comparisons, by hand."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from records import facts, record, records

from specbench.measure.breakdown import latency, served
from specbench.measure.compare import compare, holm
from specbench.measure.formulas import speedups
from specbench.measure.record import Record
from specbench.measure.recorder import drift_of_steps
from specbench.measure.results import results
from specbench.measure.sums import Sample, prompts_frame


def test_a_request_alone_waits_for_its_prompt_and_its_first_round() -> None:
    made = records(1)
    text = made[0].speculative
    assert text is not None
    rounds = text.rounds
    calls = [sum(own) for own in zip(rounds.draft, rounds.verify, rounds.accept, rounds.host, strict=True)]
    found = latency(made, 1)
    assert found["first_token"]["speculative"]["p50"] == pytest.approx(0.022 + calls[0])
    assert found["per_token"]["speculative"]["p90"] == pytest.approx(sum(calls[1:]) / (32 - rounds.tokens[0]))
    assert [*found] == ["first_token", "per_token"] and [*found["per_token"]] == ["speculative", "baseline"]


def test_of_several_rows_nothing_says_how_long_each_waited_for_its_first_token() -> None:
    made = [record("p", 16, 4, 0.7, np.random.default_rng(0), rows=2)]
    assert latency(made, 2)["first_token"]["speculative"]["p50"] is None
    assert latency(made, 2)["per_token"]["speculative"]["p50"] is not None


def arriving() -> list[Record]:
    """Six requests, one a second; the first two find nothing to wait for."""
    made = records(6, tokens=9)
    for number, own in enumerate(made):
        own.group = 0
        for text, slow in ((own.speculative, 1.0), (own.baseline, 2.0)):
            assert text is not None
            first = number + 0.5 * slow * number
            text.times = {"arrived": number, "admitted": number + 0.25, "first_token": first, "finished": first + slow}
    return made


def test_requests_that_arrive_are_timed_from_their_arrival() -> None:
    made = arriving()
    found, of = served(made, 2), latency(made, 2)
    assert of["first_token"]["speculative"]["p50"] == pytest.approx(np.median([1.0, 1.5, 2.0, 2.5]))
    assert of["first_token"]["baseline"]["p50"] == pytest.approx(np.median([2, 3, 4, 5]))
    assert found["speculative"]["queue"]["p90"] == pytest.approx(0.25)
    assert found["speculative"]["tokens_per_second"] == pytest.approx(4 * 9 / (5 + 2.5 + 1 - 2))
    assert served(records(3), 1) == {}


@pytest.mark.parametrize("lenience", [1.0, 0.7, 0.3])
def test_drift_is_recomputed(lenience: float) -> None:
    """s = min(p / l, q) + (1 - sum) residual (A.5), in numpy; it is 0 only without lenience."""
    rng = np.random.default_rng(4)
    p, q = rng.dirichlet(np.ones(9), 2)
    kept = np.minimum(p / lenience, q)
    rest = np.clip(p - q, 0, None)
    s = kept + (1 - kept.sum()) * rest / rest.sum()
    expected = [0.5 * np.abs(s - p).sum(), (s * np.log(s / p)).sum(), (s * lenience / p).max()]
    found = drift_of_steps(torch.tensor(p)[None], torch.tensor(q)[None], lenience, greedy=False)[0].tolist()
    assert found == pytest.approx(expected, abs=1e-9) and found[2] <= 1 + 1e-12
    assert (found[0] > 1e-6) == (lenience < 1)


def test_drift_at_temperature_0_counts_what_is_lost_to_the_argmax() -> None:
    p, q = torch.tensor([[0.5, 0.4, 0.1]]), torch.tensor([[0.0, 1.0, 0.0]])
    assert drift_of_steps(p, q, 0.9, greedy=True)[0].tolist() == pytest.approx([0, 0, 0.9])  # 0.4 < 0.9 * 0.5
    found = drift_of_steps(p, q, 0.5, greedy=True)[0].tolist()
    assert found == pytest.approx([1, math.log(0.5 / 0.4), 0.5 * 0.5 / 0.4])


def test_drift_of_a_run_is_the_mean_over_tested_positions() -> None:
    made = records(4)
    for number, own in enumerate(made, 1):
        own.drift = {"tv": 0.1 * number, "kl": 0.2 * number, "bound": 0.2 * number, "positions": number}
    found = results(made, facts())["details"]["drift"]
    assert found["tv"]["mean"] == pytest.approx(0.1) and found["kl"]["mean"] == pytest.approx(0.2)
    assert found["bound"] == pytest.approx(0.8)
    assert results(records(4), facts())["details"]["drift"] is None


def faster(made: list[Record], factor: float, wobble: float = 0.0, seed: int = 0) -> list[Record]:
    """The same requests, whose speculative decoding takes `factor` of the time."""
    rng = np.random.default_rng(seed)
    found = []
    for own in made:
        assert own.speculative is not None
        seconds = own.speculative.seconds * factor * float(np.exp(rng.normal(0, wobble)))
        found.append(replace(own, speculative=replace(own.speculative, seconds=seconds)))
    return found


def rows_of(runs: dict[str, list[Record]], **options: Any) -> dict[str, dict[str, Any]]:
    return {row["method"]: row for row in compare(runs, **options)}


def test_a_comparison_is_paired_and_ranked() -> None:
    made = records(10)
    found = compare({"slow": faster(made, 1.25, 0.02), "base": made, "alike": faster(made, 1.0, 0.05, 7)})
    assert [row["method"] for row in found][-1] == "slow" and found[0]["ratio"] == 1
    slow = found[-1]
    assert slow["rank"] == 3 and slow["p_value"] < 0.01 and slow["ratio"] == pytest.approx(1 / 1.25, rel=0.05)
    assert {row["rank"] for row in found[:2]} == {1} and found[1]["p_value"] > 0.05
    low, high = slow["ratio_ci95"]
    assert low < slow["ratio"] < high < 1


def test_a_comparison_is_over_the_requests_that_all_have() -> None:
    made = records(8)
    found = rows_of({"all": made, "few": made[2:]})
    assert {row["requests"] for row in found.values()} == {6} and found["all"]["ratio"] == found["few"]["ratio"] == 1
    assert found["all"]["speedup"] == pytest.approx(speedups(Sample(prompts_frame(made[2:])).total)["measured"])
    with pytest.raises(ValueError, match="share no request"):
        compare({"a": made[:2], "b": made[2:]})


def test_too_few_clusters_have_no_test() -> None:
    made = records(2)
    row = rows_of({"a": made, "b": faster(made, 2)})["b"]
    assert row["p_value"] is None and row["ratio_ci95"] is None and row["rank"] == 1


def test_holm() -> None:
    """By hand: .01 * 4, .02 * 3, and none is below one before it."""
    found = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.02})
    assert found == pytest.approx({"a": 0.04, "d": 0.06, "c": 0.06, "b": 0.06})


def test_holm_keeps_the_level_where_nothing_differs() -> None:
    """Of 100 comparisons of four equal methods at most about 5 % rank one below another."""
    wrong = 0
    for seed in range(100):
        made = records(6, tokens=4, seed=seed)
        runs = {str(i): faster(made, 1.0, 0.1, seed=100 * seed + i) for i in range(4)}
        wrong += any(row["rank"] > 1 for row in compare(runs))
    assert wrong <= 12
