"""Closed forms against simulation, and against the numbers that the paper prints."""

import numpy as np
import pytest

from specbench import theory


def simulate(alpha, gamma, rounds=200_000, seed=0):
    """Tokens of each round when every guess is accepted with probability alpha."""
    accepted = np.random.default_rng(seed).random((rounds, gamma)) < alpha
    return np.cumprod(accepted, axis=1).sum(1) + 1


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("gamma", [1, 5])
def test_equation_1(alpha, gamma):
    tokens = simulate(alpha, gamma)
    error = tokens.std() / np.sqrt(len(tokens))
    assert abs(theory.expected_tokens(alpha, gamma) - tokens.mean()) <= 5 * error + 1e-12


@pytest.mark.parametrize(("alpha", "gamma", "operations", "speed"), [
    (0.6, 2, 1.53, 1.96), (0.7, 3, 1.58, 2.53), (0.8, 2, 1.23, 2.44),
    (0.8, 5, 1.63, 3.69), (0.9, 2, 1.11, 2.71), (0.9, 10, 1.60, 6.86),
])  # fmt: skip
def test_table_1(alpha, gamma, operations, speed):
    assert theory.operations_factor(alpha, gamma, 0) == pytest.approx(operations, abs=0.006)
    assert theory.walltime_improvement(alpha, gamma, 0) == pytest.approx(speed, abs=0.006)


@pytest.mark.parametrize(("gamma", "alpha", "c", "expected"), [
    (7, 0.75, 0.02, 3.2), (7, 0.8, 0.04, 3.3), (7, 0.62, 0.02, 2.3), (3, 0.71, 0.11, 2.0), (5, 0.53, 0.02, 1.9),
])  # fmt: skip
def test_table_4(gamma, alpha, c, expected):
    assert theory.walltime_improvement(alpha, gamma, c) == pytest.approx(expected, abs=0.07)


def test_limits():
    assert theory.walltime_improvement(1, 4, 0.25) == pytest.approx(5 / 2)


@pytest.mark.parametrize(("alpha", "c"), [(0.5, 0.01), (0.8, 0.05), (0.9, 0.1)])
def test_optimal_gamma(alpha, c):
    best = theory.optimal_gamma(alpha, c)
    speeds = [theory.walltime_improvement(alpha, gamma, c) for gamma in range(65)]
    assert speeds[best] == max(speeds)


def test_a_best_gamma_beyond_what_is_compared_is_the_largest():
    """Theorem 3.8 rises for ever without a cost of drafting. With a small one its maximum is at a gamma above 64."""
    assert theory.optimal_gamma(1, 0.5) == theory.optimal_gamma(1, 0) == theory.LARGEST
    assert theory.optimal_gamma(0.3, 0.5) == 0  # the drafter is as slow as it is wrong
    best = theory.optimal_gamma(0.99, 0.001)
    around = [theory.walltime_improvement(0.99, gamma, 0.001) for gamma in (64, best - 1, best, best + 1)]
    assert 64 < best < theory.LARGEST and max(around) == around[2]
