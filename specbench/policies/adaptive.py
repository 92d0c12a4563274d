"""Chooses gamma for each round from running estimates of the requests' betas (section 3.5)."""

from dataclasses import dataclass

import numpy as np
from pydantic import Field

from specbench.decoding.sequence import Sequence
from specbench.decoding.state import State
from specbench.policies.base import Costs, GammaPolicy
from specbench.settings import LARGEST_GAMMA, BaseSettings
from specbench.theory import expected_tokens


@dataclass
class Acceptance:
    """Of one request, older guesses counting less."""

    sequence: Sequence | None
    accepted: float
    tested: float


class AdaptiveGamma(GammaPolicy):
    """Chooses the gamma that maximises equation 1, summed over the active rows at each request's own estimate of beta,
    over the measured seconds of a round (Theorem 3.8 with measured costs). All rows get the same: a round takes as long
    as its longest draft, so a row that drafted less would save nothing.

    A request's estimate is its accepted over its tested guesses. It starts from the mean of all requests so far, which
    counts as `prior` guesses; each tested guess takes the share `forget` off the weight of those before it. Rounds
    without a draft teach nothing: after `probe` of them one guess is drafted.
    """

    class Settings(BaseSettings):
        largest: int = Field(ge=1, le=LARGEST_GAMMA)
        prior: float = Field(ge=1e-3, le=1e9)
        forget: float = Field(ge=0, le=1)
        probe: int = Field(ge=1, le=10**9)

    calibrated = True

    def __init__(self, largest: int, prior: float, forget: float, probe: int):
        self.largest, self.prior, self.forget, self.probe = largest, prior, forget, probe
        self.widths = tuple(range(1, largest + 1))
        self.rows: dict[int, Acceptance] = {}
        self.accepted, self.tested = 0.0, 0  # of all requests
        self.idle = 0  # rounds without a draft since the last one with

    def calibrate(self, costs: Costs) -> None:
        self.accepted, self.tested = costs.acceptance
        self.seconds = costs.seconds(self.largest)

    def next_gamma(self, state: State) -> list[int]:
        mean = (self.accepted + 0.5) / (self.tested + 1)  # 1/2 before anything was tested
        tokens = np.zeros(self.largest + 1)
        for row in (row for row, active in enumerate(state.active) if active):
            own, sequence = self.rows.get(row), state.sequences[row]
            if own is None or own.sequence is not sequence:
                own = self.rows[row] = Acceptance(sequence, mean * self.prior, self.prior)
            tokens += expected_tokens(own.accepted / own.tested, np.arange(self.largest + 1))
        gamma = int(np.argmax(tokens / self.seconds))
        if gamma == 0 and self.idle >= self.probe:
            gamma = 1
        return [gamma] * state.batch_size

    def observe(self, drafted: list[int], kept: list[int]) -> None:
        self.idle += 1
        for row, (guesses, new) in enumerate(zip(drafted, kept, strict=True)):
            if not new or not guesses:
                continue
            self.idle = 0
            accepted, tested = new - 1, min(new, guesses)
            own, keep = self.rows[row], (1 - self.forget) ** tested
            own.accepted = own.accepted * keep + accepted
            own.tested = own.tested * keep + tested
            self.accepted += accepted
            self.tested += tested
