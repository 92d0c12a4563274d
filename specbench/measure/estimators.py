"""Ratios with standard errors and intervals, from raw counts and seconds per prompt."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from specbench.results import Estimate

BOOTSTRAP_SAMPLES = 10_000
MOST_PICKS = 1_000_000  # requests drawn at a time, which bounds memory
Floats = npt.NDArray[np.float64]


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Estimate:
    """sum(numerators) / sum(denominators), with one entry per prompt. The standard error is the linearised one for
    clustered data, since the positions of one prompt are not independent."""
    a, b = np.asarray(numerators, float), np.asarray(denominators, float)
    total, count = b.sum(), len(b)
    if total == 0:
        return Estimate(None, None, 0)
    mean = a.sum() / total
    if count < 2:
        return Estimate(float(mean), None, int(total))
    residuals = a - mean * b
    stderr = np.sqrt(count / (count - 1) * (residuals**2).sum()) / total
    return Estimate(float(mean), float(stderr), int(total))


def speedup_interval(
    baseline: Sequence[float], baseline_tokens: Sequence[int], ours: Sequence[float], our_tokens: Sequence[int]
) -> tuple[float, tuple[float, float]]:
    """Baseline seconds per token / our seconds per token, with its 95 % interval from a paired bootstrap over requests.
    With equal token counts it is the ratio of total times."""
    data = np.asarray([baseline, baseline_tokens, ours, our_tokens], float)

    def speedup(sums: Floats) -> Any:
        return (sums[0] / sums[1]) / (sums[2] / sums[3])

    low, high = np.percentile(speedup(resampled_sums(data)), [2.5, 97.5])
    return float(speedup(data.sum(-1))), (float(low), float(high))


def resampled_sums(data: Floats) -> Floats:
    """Sums [columns, samples] of a table [columns, requests] over requests drawn with replacement: the paired
    bootstrap. Every call draws the same requests."""
    requests, generator = data.shape[1], np.random.default_rng(0)
    at_a_time = max(1, MOST_PICKS // requests)
    sums = []
    for begin in range(0, BOOTSTRAP_SAMPLES, at_a_time):
        samples = min(at_a_time, BOOTSTRAP_SAMPLES - begin)
        picks = generator.integers(requests, size=(samples, requests)) + requests * np.arange(samples)[:, None]
        weights = np.bincount(picks.ravel(), minlength=samples * requests).reshape(samples, requests)
        sums.append(data @ weights.T.astype(float))
    return np.concatenate(sums, 1)
