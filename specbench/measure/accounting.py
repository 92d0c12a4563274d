"""Splits the measured speedup into four factors: Theorem 3.8's prediction and three causes of the difference.

All of them are ratios of sums over requests, so that a bootstrap over requests gives each an interval. Where rows
decode together, a request has its even share of every call it was in.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from specbench.decoded import Result
from specbench.decoding.clock import Lap
from specbench.measure.estimators import resampled_sums
from specbench.results import Factor

Floats = npt.NDArray[np.float64]


def accounting(results: Sequence[Result], gamma: int | None) -> dict[str, Factor]:
    """The four factors of the measured speedup, each with its 95 % interval; empty if nothing was drafted, or
    if a probability is not finite.

    theorem_3_8: the prediction, at the measured alpha and c. not_iid: tokens per round over equation 1. verify: the
    target's call on gamma + 1 tokens costs v steps and not 1. overhead: all the rest. `gamma` is None if a policy
    varies it; then the mean number of drafted tokens is used.
    """
    rows = [_sums(result) for result in results]
    columns = list(rows[0])
    table = np.array([list(row.values()) for row in rows]).T  # [columns, requests]
    sums = dict(zip(columns, table.sum(-1), strict=True))
    if not sums["tested"] or not sums["steps"]:
        return {}
    point = _factors(sums, gamma)
    if not np.isfinite([*point.values()]).all():  # a probability was not finite
        return {}
    with np.errstate(divide="ignore", invalid="ignore"):  # a resample may hold no tested guess
        samples = _factors(dict(zip(columns, resampled_sums(table), strict=True)), gamma)
    found = {}
    for name, value in point.items():
        low, high = np.nanpercentile(samples[name], [2.5, 97.5])
        found[name] = Factor(float(value), (float(low), float(high)))
    return found


def _sums(result: Result) -> dict[str, float]:
    """The sums over one request that the factors are computed from; times in seconds."""
    rounds, plain = result.speculative.rounds, result.baseline.rounds
    return {
        "beta": sum(sum(r.beta) for r in rounds),
        "tested": sum(r.tested for r in rounds),
        "tokens": len(result.speculative.tokens),
        "rounds": len(rounds),
        "drafted": sum(r.gamma for r in rounds),
        "draft_seconds": sum(r.seconds[Lap.DRAFT] / r.rows for r in rounds),
        "steps": sum(r.steps / r.rows for r in rounds),
        "verify_seconds": sum(r.seconds[Lap.VERIFY] / r.rows for r in rounds),
        "calls": sum(1 / r.rows for r in rounds),
        "seconds": result.speculative.seconds,
        "plain_tokens": len(result.baseline.tokens),
        "plain_step_seconds": sum(r.seconds[Lap.VERIFY] / r.rows for r in plain),
        "plain_calls": sum(1 / r.rows for r in plain),
        "plain_seconds": result.baseline.seconds,
    }


def _factors(s: Mapping[str, Any], gamma: int | None) -> dict[str, Any]:
    """The factors, from sums over requests: numbers, or arrays [samples]."""
    g = s["drafted"] / s["rounds"] if gamma is None else gamma
    alpha = np.minimum(s["beta"] / s["tested"], 1 - 1e-12)  # equation 1 is continuous at 1
    step = s["plain_step_seconds"] / s["plain_calls"]
    c = s["draft_seconds"] / s["steps"] / step
    v = s["verify_seconds"] / s["calls"] / step
    measured = (s["plain_seconds"] / s["plain_tokens"]) / (s["seconds"] / s["tokens"])
    expected = (1 - alpha ** (g + 1)) / (1 - alpha)
    known = {
        "theorem_3_8": expected / (g * c + 1),
        "not_iid": s["tokens"] / s["rounds"] / expected,
        "verify": (g * c + 1) / (g * c + v),
    }
    return known | {"overhead": measured / np.prod([*known.values()], axis=0)}
