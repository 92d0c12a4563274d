"""Why the measured speedup differs from Theorem 3.8's: four factors whose product it is.

All of them are ratios of sums over requests, so that a bootstrap over requests gives each an
interval. Where rows decode together, a request has its even share of every call it was in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from specbench.measure.estimators import resampled_sums
from specbench.results import Factor

if TYPE_CHECKING:
    from specbench.batch import Batch

COLUMNS = ("beta", "tested", "tokens", "rounds", "drafted", "draft_seconds", "steps", "verify_seconds", "calls",
           "seconds", "plain_tokens", "plain_step_seconds", "plain_calls", "plain_seconds")  # fmt: skip


def accounting(finished: Sequence[Batch], gamma: int | None) -> dict[str, Factor]:
    """theorem_3_8: the prediction, at the measured alpha and c; not_iid: tokens per round against
    equation 1; verify: the target's call on gamma + 1 tokens costs v steps and not 1; overhead: all
    the rest. `gamma` is None where a policy varies it: then the mean of what was drafted counts.
    Empty where nothing was drafted."""
    table = np.array([row for batch in finished for row in _requests(batch)]).T  # [columns, requests]
    sums = table.sum(-1)
    if not sums[COLUMNS.index("tested")] or not sums[COLUMNS.index("steps")]:
        return {}
    point = _factors(dict(zip(COLUMNS, sums, strict=True)), gamma)
    with np.errstate(divide="ignore", invalid="ignore"):  # a resample may hold no tested guess
        samples = _factors(dict(zip(COLUMNS, resampled_sums(table), strict=True)), gamma)
    return {
        name: Factor(float(value), tuple(map(float, np.nanpercentile(samples[name], [2.5, 97.5]))))
        for name, value in point.items()
    }


def _requests(batch: Batch) -> list[list[float]]:
    rows = []
    for index in range(len(batch.requests)):
        rounds = [r for r in batch.speculative.rounds if r.row == index]
        plain = [r for r in batch.baseline.rounds if r.row == index]
        rows.append([
            sum(sum(r.beta) for r in rounds),
            sum(r.tested for r in rounds),
            len(batch.speculative.tokens[index]),
            len(rounds),
            sum(r.gamma for r in rounds),
            sum(r.seconds["draft"] / r.rows for r in rounds),
            sum(r.steps / r.rows for r in rounds),
            sum(r.seconds["verify"] / r.rows for r in rounds),
            sum(1 / r.rows for r in rounds),
            batch.speculative.seconds_of(index),
            len(batch.baseline.tokens[index]),
            sum(r.seconds["verify"] / r.rows for r in plain),
            sum(1 / r.rows for r in plain),
            batch.baseline.seconds_of(index),
        ])  # fmt: skip
    return rows


def _factors(s: dict[str, np.ndarray], gamma: int | None) -> dict[str, np.ndarray]:
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
