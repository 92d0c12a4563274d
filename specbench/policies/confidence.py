"""Stops drafting when q(x) of a guess falls below a threshold, as transformers' assisted generation does."""

from pydantic import Field
from torch import Tensor

from specbench.decoding.state import State
from specbench.policies.base import GammaPolicy
from specbench.settings import LARGEST_GAMMA, BaseSettings


def probability(q: Tensor, x: Tensor) -> Tensor:
    """q(x) [B] of the guesses x [B]; q [B, V]."""
    return q.gather(-1, x[:, None])[:, 0]


class ConfidenceGamma(GammaPolicy):
    """Drafts until a guess has q(x) below `threshold`; that guess is still verified."""

    class Settings(BaseSettings):
        largest: int = Field(ge=1, le=LARGEST_GAMMA)
        threshold: float = Field(ge=0, le=1)

    watches = True

    def __init__(self, largest: int, threshold: float):
        self.largest, self.threshold = largest, threshold
        self.signal = probability
        self.widths = tuple(range(1, largest + 1))

    def next_gamma(self, state: State) -> list[int]:
        return [self.largest] * state.batch_size

    def go_on(self, state: State, count: list[int], signals: list[float]) -> list[bool]:
        return [signal >= self.threshold for signal in signals]
