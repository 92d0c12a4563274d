"""One gamma for the whole run: the best by the corrected form of Theorem 3.8, as calibrated."""

from dataclasses import dataclass

import numpy as np

from specbench.context import Context
from specbench.decoding.state import Draft, State
from specbench.measure.costs import CostTable
from specbench.settings import setting


def expected_tokens(alpha: float, largest: int) -> np.ndarray:
    """Equation 1 for gamma = 0 .. largest, [largest + 1]."""
    return np.cumsum(np.power(alpha, np.arange(largest + 1)))


def best_gamma(alpha: float, seconds: np.ndarray) -> int:
    """argmax over gamma of equation 1 over the measured time of such a round, seconds [largest + 1]."""
    return int(np.argmax(expected_tokens(alpha, len(seconds) - 1) / seconds))


class OptimalGamma:
    """argmax of E(tokens) / (gamma c + v(gamma) + o), with alpha and all costs from a calibration
    pass that decodes some of the run's own prompts with every gamma up to `largest` (section 3.5)."""

    @dataclass
    class Settings:
        largest: int = setting(ge=1)

    def __init__(self, settings: Settings, context: Context | None):
        self.largest = settings.largest
        self.widths = tuple(range(1, settings.largest + 1))
        self.constant: int | None = None

    def calibrate(self, costs: CostTable) -> None:
        """Chooses, from what was measured before the first prompt."""
        self.constant = best_gamma(costs.alpha, costs.seconds(self.largest))

    def next_gamma(self, state: State) -> list[int]:
        return [self.constant] * state.batch_size

    def observe(self, draft: Draft, kept: list[int]) -> None:
        pass
