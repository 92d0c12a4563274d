"""The speedup of every second prompt, predicted from the others: a pilot that shares none of their draws and times.

The prediction takes the pilot's costs and, for its accepted guesses, the sum of their betas, so that it does not follow
the luck of its draws.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from specbench.measure.accounting import cost_ratios
from specbench.measure.estimators import Sums
from specbench.results import Prediction


def prediction(rows: Sequence[Mapping[str, float]], clusters: Sequence[Hashable]) -> Prediction | None:
    """The prediction, and what it predicts as it was measured; `rows` are the sums over each request (`sums_of`). None
    if a half has too few clusters for an interval, or nothing was tested."""
    others = {*list(dict.fromkeys(clusters))[1::2]}
    halves = [[i for i, cluster in enumerate(clusters) if (cluster in others) == half] for half in (False, True)]
    if not all(halves):
        return None
    pilot, rest = (Sums.of([rows[i] for i in half], [clusters[i] for i in half]) for half in halves)
    if pilot.samples is None or rest.samples is None or not pilot.point["tested"]:
        return None
    value = float(_promised(pilot.point))
    # What is measured deviates by the error of the pilot, and by that of the prompts themselves.
    with np.errstate(divide="ignore", invalid="ignore"):
        spread = np.hypot(np.log(_promised(pilot.samples)).std(), np.log(_measured(rest.samples)).std())
    low, high = (value * float(np.exp(sign * 1.96 * spread)) for sign in (-1, 1))
    if not np.isfinite([value, low, high]).all():
        return None
    return Prediction(value, (low, high), float(_measured(rest.point)), len(halves[1]))


def _promised(s: Mapping[str, Any]) -> Any:
    """The speedup that a pilot with these sums promises."""
    cost = cost_ratios(s)
    call = s["draft_seconds"] / s["calls"] + (cost["v"] + cost["o"]) * cost["target_step_seconds"]
    return s["plain_seconds"] / s["plain_tokens"] * (s["rounds"] + s["beta"]) / s["calls"] / call


def _measured(s: Mapping[str, Any]) -> Any:
    return (s["plain_seconds"] / s["plain_tokens"]) / (s["seconds"] / s["tokens"])
