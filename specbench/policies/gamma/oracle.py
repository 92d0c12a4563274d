"""Oracles for replay only: bounds on what any gamma policy can gain (section 3.5)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specbench.decoding.gamma_policy import Costs, GammaPolicy, RowsSeen
from specbench.policies.gamma.optimal import Array
from specbench.settings import LARGEST_GAMMA, BaseSettings, setting


class OracleGamma(GammaPolicy):
    """Drafts in every round guesses that will be accepted, as many as make the text cheapest. Where a round costs
    1 + gamma c and c < 1 these are all of them: the oracle of section 3.5. No policy is faster on the same text."""

    @dataclass
    class Settings(BaseSettings):
        largest: int = setting(ge=1, le=LARGEST_GAMMA)

    replay_only = True

    def __init__(self, largest: int):
        self.largest = largest
        self.widths = tuple(range(1, largest + 1))

    def foresee(self, outcomes: Sequence[bool], betas: Array, seconds: Array) -> None:
        count, run = len(outcomes), 0
        left, self.best = np.zeros(count + 1), [0] * count  # seconds from each place to the end, and gamma there
        for place in reversed(range(count)):
            run = run + 1 if outcomes[place] else 0
            most = min(run, self.largest, count - place - 1)
            cost = seconds[: most + 1] + left[place + 1 : place + most + 2]
            self.best[place] = int(cost.argmin())
            left[place] = cost[self.best[place]]

    def next_gamma(self, state: RowsSeen) -> list[int]:
        return [self.best[state.lengths[0] - state.prompt_lengths[0]]]  # the place in the text


class KnownBetas(OracleGamma):
    """Knows the true beta of every coming guess, but not which will be accepted, and drafts what pays best in a round.
    It is no bound: a plan of the whole text, or a policy that sees the drawn guess too, may gain more."""

    calibrated = True

    def calibrate(self, costs: Costs) -> None:
        self.seconds = costs.seconds(self.largest)
        self.tokens, self.time = 1.0, float(self.seconds[0])

    def foresee(self, outcomes: Sequence[bool], betas: Array, seconds: Array) -> None:
        self.betas = np.nan_to_num(betas)

    def next_gamma(self, state: RowsSeen) -> list[int]:
        place = state.lengths[0] - state.prompt_lengths[0]
        ahead = self.betas[place:][: self.largest]
        gain = np.concatenate([[0.0], np.cumsum(np.cumprod(ahead))])
        return [int(np.argmax(gain - self.seconds[: len(gain)] * self.tokens / self.time))]

    def observe(self, drafted: list[int], kept: list[int]) -> None:
        self.tokens += kept[0]
        self.time += float(self.seconds[drafted[0]])
