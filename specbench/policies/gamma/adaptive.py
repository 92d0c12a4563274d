"""Chooses gamma for each round from running estimates of the rows' betas (section 3.5)."""

from dataclasses import dataclass

import numpy as np

from specbench.decoding.gamma_policy import Costs, GammaPolicy, RowsSeen
from specbench.policies.gamma.per_request_state import PerRow
from specbench.settings import LARGEST_GAMMA, BaseSettings, setting
from specbench.theory import expected_tokens


class AdaptiveGamma(GammaPolicy):
    """Chooses the gamma that maximises equation 1, summed over the active rows at each row's own estimate of beta, over
    the measured seconds of a round (Theorem 3.8 with measured costs). All rows get the same: a round takes as long as
    its longest draft, so a row that drafted less would save nothing.

    A row's estimate is accepted over tested guesses of the row. It starts from the mean of all rows so far, which
    counts as `prior` guesses; each tested guess takes the share `forget` off the weight of those before it. Rounds
    without a draft teach nothing: after `probe` of them one guess is drafted.
    """

    @dataclass
    class Settings(BaseSettings):
        largest: int = setting(ge=1, le=LARGEST_GAMMA)
        prior: float = setting(ge=1e-3, le=1e9)
        forget: float = setting(ge=0, le=1)
        probe: int = setting(ge=1, le=10**9)

    calibrated = True

    def __init__(self, largest: int, prior: float, forget: float, probe: int):
        self.largest, self.prior, self.forget, self.probe = largest, prior, forget, probe
        self.widths = tuple(range(1, largest + 1))
        self.rows: PerRow[tuple[float, float]] = PerRow()  # accepted, tested
        self.everyone = (0.0, 0)
        self.idle = 0  # rounds without a draft since the last one with

    def calibrate(self, costs: Costs) -> None:
        self.everyone = costs.acceptance
        self.seconds = costs.seconds(self.largest)

    def next_gamma(self, state: RowsSeen) -> list[int]:
        tokens = np.zeros(self.largest + 1)
        for row in (row for row, on in enumerate(state.active) if on):
            accepted, tested = self.rows.of(state, row, (self._mean() * self.prior, self.prior))
            tokens += expected_tokens(accepted / tested, np.arange(self.largest + 1))
        gamma = int(np.argmax(tokens / self.seconds)) or int(self.idle >= self.probe)
        return [gamma] * state.batch_size

    def observe(self, drafted: list[int], kept: list[int]) -> None:
        self.idle += 1
        for row, (guesses, new) in enumerate(zip(drafted, kept, strict=True)):
            if not new or not guesses:
                continue
            self.idle = 0
            accepted, tested = new - 1, min(new, guesses)
            old_accepted, old_tested = self.rows[row][1]
            keep = (1 - self.forget) ** tested
            self.rows.change(row, (old_accepted * keep + accepted, old_tested * keep + tested))
            self.everyone = self.everyone[0] + accepted, self.everyone[1] + tested

    def _mean(self) -> float:
        """Accepted over tested guesses of all rows so far; 1/2 before there is one."""
        return (self.everyone[0] + 0.5) / (self.everyone[1] + 1)
