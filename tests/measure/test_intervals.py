"""Intervals: the jackknife by hand, Student's t, and coverage by simulation with heteroscedastic drift."""

import math
from typing import Any

import numpy as np
import pytest

from specbench.measure.formulas import speedups
from specbench.measure.sums import FEWEST, Sums, by_cluster, estimates, student, student_tail


def ratio(s: Sums) -> dict[str, Any]:
    return {"ratio": s["a"] / s["b"]}


def columns(n: int = 12, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {"a": rng.uniform(1, 2, n), "b": rng.uniform(3, 5, n)}


@pytest.mark.parametrize("log", [True, False])
def test_the_jackknife_is_that_of_a_loop(log: bool) -> None:
    made = columns()
    found = estimates(made, range(12), ratio, log)["ratio"]
    assert found.value == pytest.approx(made["a"].sum() / made["b"].sum())
    left = [np.delete(made["a"], i).sum() / np.delete(made["b"], i).sum() for i in range(12)]
    values = np.log(left) if log else np.array(left)
    half = 2.200985 * math.sqrt(11 / 12 * sum((x - values.mean()) ** 2 for x in values))  # t of 11 degrees of freedom
    centre = math.log(found.value) if log else found.value
    low, high = centre - half, centre + half
    assert found.ci95 == pytest.approx((math.exp(low), math.exp(high)) if log else (low, high), rel=1e-5)
    assert found.stderr == pytest.approx(math.sqrt(11 / 12 * sum((x - np.mean(left)) ** 2 for x in left)))


def test_clusters_are_summed_first() -> None:
    made, clusters = columns(), ["x", "y", "z", "x", "y", "z", "x", "y", "z", "x", "y", "z"]
    summed = by_cluster(made, clusters)
    assert summed["a"].tolist() == pytest.approx([made["a"][i::3].sum() for i in range(3)])
    assert estimates(made, clusters, ratio) == estimates(summed, range(3), ratio)
    assert estimates(made, clusters, ratio) != estimates(made, range(12), ratio)


def test_with_too_few_clusters_there_is_no_interval() -> None:
    for n in range(1, FEWEST):
        found = estimates(columns(n), range(n), ratio)["ratio"]
        assert found.value is not None and found.ci95 is None and found.stderr is None
    assert estimates(columns(FEWEST), range(FEWEST), ratio)["ratio"].ci95 is not None


def test_a_cluster_that_says_nothing_of_a_number_is_not_counted() -> None:
    made = columns(8)
    padded = {name: np.append(column, [0.0] * 30) for name, column in made.items()}
    assert estimates(padded, range(38), ratio)["ratio"] == estimates(made, range(8), ratio)["ratio"]


def test_what_has_no_value_has_no_interval() -> None:
    nothing = {"a": np.zeros(5), "b": np.zeros(5)}
    assert estimates(nothing, range(5), ratio)["ratio"].value is None
    zero = estimates({"a": np.zeros(5), "b": np.arange(1.0, 6)}, range(5), ratio)["ratio"]
    assert zero.value == 0
    one = {"a": np.array([3.0, 0, 0, 0, 0]), "b": np.array([4.0, 0, 0, 0, 0])}  # nothing is left without the first
    assert estimates(one, range(5), ratio)["ratio"].ci95 is None


@pytest.mark.parametrize(
    ("freedom", "expected"), [(1, 12.7062), (2, 4.30265), (7, 2.36462), (31, 2.03951), (500, 1.96472)]
)
def test_student(freedom: int, expected: float) -> None:
    assert student(freedom) == pytest.approx(expected, rel=1e-4)
    assert student_tail(expected, freedom) == pytest.approx(0.05, abs=1e-4)
    assert student_tail(0, freedom) == pytest.approx(1) and student_tail(-expected, freedom) < 0.06


def simulated(prompts: int, rng: np.random.Generator) -> dict[str, Any]:
    """Sums of one run whose true speedup is 1.5: texts differ in length, the machine's pace drifts and is noisier for
    some prompts than for others, and the methods are decoded in turn, so that both share a prompt's pace."""
    tokens = rng.integers(16, 65, prompts).astype(float)
    drift = np.exp(np.linspace(0, 0.3, prompts) + rng.normal(0, 0.1, prompts).cumsum() * 0.3)
    spread = rng.choice([0.05, 0.3], prompts)  # heteroscedastic
    noise = [np.exp(rng.normal(0, spread) - spread**2 / 2) for _ in range(2)]
    return {
        "tokens": tokens,
        "plain_tokens": tokens,
        "plain_seconds": 0.03 * tokens * drift * noise[0],
        "seconds": 0.02 * tokens * drift * noise[1],
        "plain_prefill_seconds": np.zeros(prompts),
        "prefill_seconds": np.zeros(prompts),
    }


@pytest.mark.parametrize("prompts", [8, 16, 32])
def test_coverage_is_95_percent(prompts: int) -> None:
    """Of 3,000 runs; without Student's t or with a spread that is too small it is outside (the control)."""
    rng, runs, covered, narrow = np.random.default_rng(prompts), 3000, 0, 0
    for _ in range(runs):
        found = estimates(simulated(prompts, rng), range(prompts), speedups)["measured"]
        assert found.ci95 is not None and found.value is not None
        low, high = (math.log(end / found.value) for end in found.ci95)
        error = math.log(1.5 / found.value)
        covered += low <= error <= high
        narrow += 0.7 * low <= error <= 0.7 * high
    assert 0.92 <= covered / runs <= 0.97, covered / runs
    assert narrow / runs < 0.92
