"""Rates with their errors, from raw counts per prompt."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

BOOTSTRAP_SAMPLES = 10_000


@dataclass(frozen=True)
class Estimate:
    """A ratio of sums over prompts, with the standard error of prompts as clusters."""

    mean: float | None
    stderr: float | None
    n: int  # what the denominator counts


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Estimate:
    """sum(numerators) / sum(denominators), one entry per prompt. The standard error is the
    linearised one for clustered data, since the positions of one prompt are not independent."""
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
    """Ratio of seconds per token over the same batches of prompts, and its 95 % interval from a
    paired bootstrap. With equal token counts it is the ratio of total times."""
    data = np.asarray([baseline, baseline_tokens, ours, our_tokens], float)

    def speedup(sums: np.ndarray) -> np.ndarray:
        return (sums[0] / sums[1]) / (sums[2] / sums[3])

    low, high = np.percentile(speedup(resampled_sums(data)), [2.5, 97.5])
    return float(speedup(data.sum(-1))), (float(low), float(high))


def resampled_sums(data: np.ndarray) -> np.ndarray:
    """Sums [columns, samples] of a table [columns, requests] over requests drawn with replacement:
    the paired bootstrap. The draws are the same in every call."""
    requests = data.shape[1]
    picks = np.random.default_rng(0).integers(requests, size=(BOOTSTRAP_SAMPLES, requests))
    weights = np.zeros((BOOTSTRAP_SAMPLES, requests))
    np.add.at(weights, (np.arange(BOOTSTRAP_SAMPLES)[:, None], picks), 1)
    return data @ weights.T
