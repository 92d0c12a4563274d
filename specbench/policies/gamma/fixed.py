"""The paper's policy: the same gamma in every round (Algorithm 1)."""

from dataclasses import dataclass

from specbench.decoding.gamma_policy import GammaPolicy, RowsSeen, Signal
from specbench.settings import LARGEST_GAMMA, BaseSettings, setting


class FixedGamma(GammaPolicy):
    """Drafts `gamma` tokens in every round."""

    @dataclass
    class Settings(BaseSettings):
        gamma: int = setting(ge=0, le=LARGEST_GAMMA)

    def __init__(self, gamma: int):
        self.constant = self.largest = gamma
        self.widths = (gamma,)

    def next_gamma(self, state: RowsSeen) -> list[int]:
        return [self.largest] * state.batch_size


class WatchedGamma(FixedGamma):
    """A constant gamma that also computes another policy's signal, so that its rounds take as long as that policy's."""

    def __init__(self, gamma: int, signal: Signal | None):
        super().__init__(gamma)
        self.signal = signal
