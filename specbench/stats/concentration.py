"""How far sums of martingale differences get by chance: the bounds of the losslessness test.

If every token is drawn from p, then f(x_t) - E_p f has mean 0 given the text before it, for any f that is known before
the draw. Both bounds hold for sums of any size, so a few rare events (point masses) raise no false alarm. They are used
with the variance and the probabilities that were seen, as if these had been known before the first draw.
"""

import math

import numpy as np

from specbench.stats.estimates import Floats
from specbench.stats.verdict_records import Events, MartingaleSums

TILTS = np.geomspace(1e-3, 40, 80)  # lambda; every one gives a valid bound, the smallest is taken


def freedman(sums: MartingaleSums, largest: float) -> float:
    """The probability that an exact run deviates at least as much, at most 2 exp(-s^2 / (2 (variance + largest s / 3)))
    for a deviation s, where no difference exceeds `largest` (Freedman 1975)."""
    s = abs(sums.deviation)
    if s == 0:
        return 1.0
    return min(1.0, 2 * math.exp(-(s**2) / (2 * (sums.variance + largest * s / 3))))


def chernoff(events: Events, weights: Floats, deviation: float) -> float:
    """The probability that the weighted sum of events [K] minus its mean is at least as far from 0 as `deviation`: at
    most 2 min over lambda of E exp(lambda (sum - |deviation|)) (Chernoff 1952). weights [K] are not negative."""
    if deviation == 0 or not len(weights):
        return 1.0
    signed = math.copysign(1.0, deviation) * weights
    centre = float((events.mean * signed).sum()) + abs(deviation)
    with np.errstate(divide="ignore", invalid="ignore"):  # log 0 of certain events; a mean may be no number
        no, yes = np.log1p(-events.mean), np.log(events.mean)
        exponents = [float(np.logaddexp(no, yes + tilt * signed).sum()) - tilt * centre for tilt in TILTS]
    return min(1.0, 2 * math.exp(min(0.0, *exponents)))


def deviation(events: Events, weights: Floats) -> float:
    """The weighted sum of events [K] minus its mean."""
    return float(((events.happened - events.mean) * weights).sum())


def weighted_sd(mean: Floats, weights: Floats) -> float:
    """The standard deviation of a weighted sum of events with these probabilities [K]."""
    return math.sqrt(float((mean * (1 - mean) * weights**2).sum()))


def z(deviation: float, spread: float) -> float:
    """deviation / spread; 0 if both are 0."""
    return deviation / spread if spread > 0 else math.copysign(math.inf, deviation) if deviation else 0.0
