"""One gamma for the whole run: the best by Theorem 3.8 with measured costs (section 3.5)."""

import numpy as np
from pydantic import Field

from specbench.decoding.state import State
from specbench.policies.base import Costs, GammaPolicy
from specbench.settings import LARGEST_GAMMA, BaseSettings
from specbench.theory import expected_tokens


class OptimalGamma(GammaPolicy):
    """Maximises E(tokens) / (gamma c + v(gamma) + o) (section 3.5), with alpha and all costs from a calibration pass
    that decodes some of the run's own prompts with every gamma up to `largest`."""

    class Settings(BaseSettings):
        largest: int = Field(ge=1, le=LARGEST_GAMMA)

    calibrated = True

    def __init__(self, largest: int):
        self.largest = largest
        self.widths = tuple(range(1, largest + 1))

    def calibrate(self, costs: Costs) -> None:
        """Chooses gamma, before the first prompt: it maximises equation 1 over the seconds of such a round."""
        tokens = expected_tokens(costs.alpha, np.arange(self.largest + 1))
        self.constant = int(np.argmax(tokens / costs.seconds(self.largest)))

    def next_gamma(self, state: State) -> list[int]:
        assert self.constant is not None, "calibrate comes first"
        return [self.constant] * state.batch_size
