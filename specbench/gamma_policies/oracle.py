"""Bounds on what any gamma policy can gain. They know a trace, so they exist in replay only."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specbench.context import Context
from specbench.decoding.state import Draft, State
from specbench.measure.costs import CostTable
from specbench.settings import setting


class OracleGamma:
    """Every round drafts exactly the guesses that will be accepted: the bound of section 3.5."""

    @dataclass
    class Settings:
        largest: int = setting(ge=1)

    constant = None
    replay_only = True

    def __init__(self, settings: Settings, context: Context | None):
        self.largest = settings.largest
        self.widths = tuple(range(1, settings.largest + 1))

    def foresee(self, outcomes: Sequence[bool], betas: np.ndarray) -> None:
        """For each position of a text, whether a guess would be accepted there, and with what beta."""
        self.outcomes, self.betas = outcomes, np.nan_to_num(betas)

    def next_gamma(self, state: State) -> list[int]:
        ahead = self.outcomes[_place(state) :][: self.largest]
        return [int(np.cumprod(ahead).sum())]

    def observe(self, draft: Draft, kept: list[int]) -> None:
        pass


class KnownBetas(OracleGamma):
    """Every round drafts what pays best given the true beta of every guess to come, though not which
    will be accepted: a bound on policies that predict beta, however well they do."""

    def calibrate(self, costs: CostTable) -> None:
        self.seconds = costs.seconds(self.largest)
        self.tokens, self.time = 1.0, float(self.seconds[0])

    def next_gamma(self, state: State) -> list[int]:
        ahead = self.betas[_place(state) :][: self.largest]
        gain = np.concatenate([[0.0], np.cumsum(np.cumprod(ahead))])
        return [int(np.argmax(gain - self.seconds[: len(gain)] * self.tokens / self.time))]

    def observe(self, draft: Draft, kept: list[int]) -> None:
        self.tokens += kept[0]
        self.time += float(self.seconds[draft.tokens.shape[1]])


def _place(state: State) -> int:
    """The position in the text."""
    return state.lengths[0] - state.prompt_lengths[0]
