"""The schedule `heuristic_transient` of gamma in transformers' assisted generation."""

from dataclasses import dataclass

from specbench.decoding.gamma_policy import GammaPolicy, RowsSeen
from specbench.policies.gamma.per_request_state import PerRow
from specbench.settings import LARGEST_GAMMA, BaseSettings, setting


class HeuristicGamma(GammaPolicy):
    """gamma rises by 2 after a round in which every guess was accepted and falls by 1 after any other, between 1 and
    `largest`. Each row begins at `gamma` and has its own."""

    @dataclass
    class Settings(BaseSettings):
        gamma: int = setting(ge=1, le=LARGEST_GAMMA)
        largest: int = setting(ge=1, le=LARGEST_GAMMA)

    def __init__(self, gamma: int, largest: int):
        self.first, self.largest = min(gamma, largest), largest
        self.widths = tuple(range(1, largest + 1))
        self.rows: PerRow[int] = PerRow()

    def next_gamma(self, state: RowsSeen) -> list[int]:
        return [self.rows.of(state, row, self.first) for row in range(state.batch_size)]

    def observe(self, drafted: list[int], kept: list[int]) -> None:
        for row, (guesses, new) in enumerate(zip(drafted, kept, strict=True)):
            if new:
                wanted = self.rows[row][1]
                wanted = wanted + 2 if new == guesses + 1 else wanted - 1
                self.rows.change(row, min(max(wanted, 1), self.largest))
