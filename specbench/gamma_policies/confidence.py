"""Drafting ends at a guess that the drafter itself does not believe in, as in transformers."""

from dataclasses import dataclass

from torch import Tensor

from specbench.context import Context
from specbench.decoding.state import Draft, State
from specbench.settings import setting


def probability(q: Tensor, x: Tensor) -> Tensor:
    """q(x) [B] of the guesses x [B]."""
    return q.gather(-1, x[:, None])[:, 0]


class ConfidenceGamma:
    """Drafts until a guess has q(x) below `threshold`; that guess is still verified."""

    @dataclass
    class Settings:
        largest: int = setting(ge=1)
        threshold: float = setting(ge=0, le=1)

    constant = None
    signal = staticmethod(probability)
    traced_as = "confidence"  # of a text, in replay: the largest q, which is q(x) at temperature 0

    def __init__(self, settings: Settings, context: Context | None):
        self.largest, self.threshold = settings.largest, settings.threshold
        self.widths = tuple(range(1, settings.largest + 1))

    def next_gamma(self, state: State) -> list[int]:
        return [self.largest] * state.batch_size

    def go_on(self, state: State, count: list[int], signals: list[float]) -> list[bool]:
        return [s >= self.threshold for s in signals]

    def observe(self, draft: Draft, kept: list[int]) -> None:
        pass
