"""The paper's policy: the same gamma in every round (Algorithm 1)."""

from pydantic import Field

from specbench.decoding.state import State
from specbench.policies.base import GammaPolicy, Signal
from specbench.settings import LARGEST_GAMMA, BaseSettings


class FixedGamma(GammaPolicy):
    """Drafts `gamma` tokens in every round. With another policy's `signal` it computes that after each guess too, so
    that its rounds take as long as that policy's."""

    class Settings(BaseSettings):
        gamma: int = Field(ge=0, le=LARGEST_GAMMA)

    def __init__(self, gamma: int, signal: Signal | None = None):
        self.constant = self.largest = gamma
        self.widths = (gamma,)
        self.signal = signal

    def next_gamma(self, state: State) -> list[int]:
        return [self.largest] * state.batch_size
