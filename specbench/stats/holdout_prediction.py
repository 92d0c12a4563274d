"""The speedup of every second prompt, predicted from the others of the same process: a pilot.

The prediction takes the pilot's costs and, for its accepted guesses, the sum of their betas, in which there is less
chance than in their number.
"""

from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from specbench.stats.bootstrap import BootstrapSums, student
from specbench.stats.estimates import Floats, Prediction
from specbench.stats.formulas import speedup_of


def prediction(columns: Mapping[str, Floats], clusters: Sequence[Hashable]) -> Prediction | None:
    """The prediction, and what it predicts as it was measured; `columns` are the sums over each request, by name. None
    if a half has too few clusters for an interval, or nothing was tested."""
    others = {*list(dict.fromkeys(clusters))[1::2]}
    halves = [[i for i, cluster in enumerate(clusters) if (cluster in others) == half] for half in (False, True)]
    if not all(halves):
        return None
    pilot, rest = (
        BootstrapSums({name: found[half] for name, found in columns.items()}, [clusters[i] for i in half])
        for half in halves
    )
    if pilot.samples is None or rest.samples is None or not pilot.point["tested"]:
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        value, measured = speedup_of(pilot.point, "expected"), speedup_of(rest.point)
        # What is measured deviates by the error of the pilot and by that of as many other prompts; both are known from
        # the pilot alone.
        errors = [pilot.stderr(np.log(speedup_of(pilot.samples, tokens))) for tokens in ("expected", "tokens")]
    spread = np.hypot(errors[0], errors[1] * np.sqrt(pilot.clusters / rest.clusters))
    low, high = (value * np.exp(sign * student(pilot.clusters - 1) * spread) for sign in (-1, 1))
    if not np.isfinite([value, low, high, measured]).all():
        return None
    return Prediction(float(value), (float(low), float(high)), float(measured), len(halves[1]))
