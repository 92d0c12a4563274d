"""The statistics of the losslessness test above temperature 0, and the smallest faults that they would find.

log_p: the sum of log p(x) - E_p log p over all tokens. draft_leak: how many tokens are ones that the drafter proposes
too often, against their probability under p. guess: how many tested guesses stand in the text, against the probability
of it, weighted so that lenience shows best. The bounds hold for sums of any size.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from specbench.stats.estimates import Floats
from specbench.stats.verdict_records import LOG_FLOOR, Events, MartingaleSums, ReferenceScore

TESTS = 3  # statistics
VERDICT_LEVEL = 1 / 200  # the probability that one of them is beyond its limit in an exact run is at most this
TYPICAL = 0.9  # the lenience that the weights of guesses are made for
FOUND = 1.28  # standard deviations: a fault that deviates by this much beyond the limit is found in nine of ten runs
TILTS = np.geomspace(1e-3, 40, 80)  # lambda; every one gives a valid bound, the smallest is taken


@dataclass(frozen=True)
class Statistics:
    """All texts of a run together. K tested guesses."""

    log_p: MartingaleSums
    leak: Events  # [K]
    guess: Events  # [K], empty if the verifier has no rule for a single guess
    ratios: Floats  # [K], p / q of the guesses; empty if the verifier does not accept with probability min(1, p / q)

    @staticmethod
    def of(readings: Sequence[ReferenceScore]) -> "Statistics":
        """The sums and events of all texts."""
        return Statistics(
            sum((reading.log_p for reading in readings), MartingaleSums()),
            Events.join([reading.leak for reading in readings]),
            Events.join([reading.guess for reading in readings]),
            np.concatenate([reading.ratios for reading in readings]),
        )

    def weights(self) -> tuple[Floats, Floats]:
        """Weights [K] of `leak` and of `guess`: for a guess, the change of its probability with lenience TYPICAL over
        its variance."""
        mean = self.guess.mean
        if not len(self.ratios):
            return np.ones(len(self.leak)), np.ones(len(mean))
        with np.errstate(divide="ignore"):
            guess = np.minimum((1 / TYPICAL - 1) / (1 - mean), 1 / mean)
        return np.ones(len(self.leak)), guess

    def bounds(self) -> dict[str, float]:
        """By statistic, a bound on the probability that an exact run deviates at least as much."""
        leak, guess = self.weights()
        return {
            "log_p": freedman(self.log_p, -LOG_FLOOR),
            "draft_leak": chernoff(self.leak, leak, deviation(self.leak, leak)),
            "guess": chernoff(self.guess, guess, deviation(self.guess, guess)),
        }

    def z(self) -> dict[str, float]:
        """By statistic, its deviation in standard deviations."""
        leak, guess = self.weights()
        return {
            "log_p": z(self.log_p.deviation, math.sqrt(self.log_p.variance)),
            "draft_leak": z(deviation(self.leak, leak), weighted_sd(self.leak.mean, leak)),
            "guess": z(deviation(self.guess, guess), weighted_sd(self.guess.mean, guess)),
        }

    def detectable_tv(self) -> float | None:
        """The smallest total variation, at tested positions and towards tokens that the drafter proposes too often,
        that nine of ten runs of this size would find; None if no guess was tested."""
        if not len(self.leak):
            return None
        weights = self.weights()[0]
        error = FOUND * weighted_sd(self.leak.mean, weights)

        def found(tv: float) -> bool:
            return chernoff(self.leak, weights, max(0.0, tv * len(self.leak) - error)) < VERDICT_LEVEL / TESTS

        return smallest(found, 1000) or 1.0

    def detectable_lenience(self) -> float | None:
        """The lenience closest to 1 that nine of ten runs of this size would find, in steps of .01; None if there is
        none."""
        weights = self.weights()[1]

        def found(distance: float) -> bool:
            mean = np.minimum(self.ratios / (1 - distance), 1)
            shift = float(((mean - self.guess.mean) * weights).sum()) - FOUND * weighted_sd(mean, weights)
            return chernoff(self.guess, weights, max(0.0, shift)) < VERDICT_LEVEL / TESTS

        distance = smallest(found, 100) if len(self.ratios) else None
        return None if distance is None else round(1 - distance, 2)


def smallest(found: Callable[[float], bool], steps: int) -> float | None:
    """The smallest k / steps, with k from 1 to steps - 1, at which a fault is found, by bisection; None if none is."""
    low, high = 0, steps - 1
    if not found(high / steps):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if found(middle / steps) else (middle, high)
    return high / steps


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
