"""The schedule `heuristic_transient` of gamma in transformers' assisted generation."""

from pydantic import Field

from specbench.decoding.sequence import Sequence
from specbench.decoding.state import State
from specbench.policies.base import GammaPolicy
from specbench.settings import LARGEST_GAMMA, BaseSettings


class HeuristicGamma(GammaPolicy):
    """gamma rises by 2 after a round in which every guess was accepted and falls by 1 after any other, between 1 and
    `largest`. Each request begins at `gamma` and has its own."""

    class Settings(BaseSettings):
        gamma: int = Field(ge=1, le=LARGEST_GAMMA)
        largest: int = Field(ge=1, le=LARGEST_GAMMA)

    def __init__(self, gamma: int, largest: int):
        self.first, self.largest = min(gamma, largest), largest
        self.widths = tuple(range(1, largest + 1))
        self.gammas: dict[int, int] = {}  # by row
        self.sequences: list[Sequence | None] = []  # by row, the one that it belongs to

    def next_gamma(self, state: State) -> list[int]:
        before = self.sequences or [None] * state.batch_size
        for row, sequence in enumerate(state.sequences):
            if row not in self.gammas or sequence is not before[row]:
                self.gammas[row] = self.first
        self.sequences = list(state.sequences)
        return [self.gammas[row] for row in range(state.batch_size)]

    def observe(self, drafted: list[int], kept: list[int]) -> None:
        for row, (guesses, new) in enumerate(zip(drafted, kept, strict=True)):
            if new:
                wanted = self.gammas[row] + (2 if new == guesses + 1 else -1)
                self.gammas[row] = min(max(wanted, 1), self.largest)
