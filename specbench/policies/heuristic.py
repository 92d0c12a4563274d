"""A schedule of transformers for gamma, which needs no measurement."""

from pydantic import Field

from specbench.decoding.sequence import Sequence
from specbench.decoding.state import State
from specbench.policies.base import VaryingGamma
from specbench.settings import LARGEST_GAMMA


class HeuristicGamma(VaryingGamma):
    """`heuristic_transient` of transformers' assisted generation: gamma rises by 2 after a round in which every guess
    was accepted and falls by 1 after any other, between 1 and `largest`. Each request begins at `gamma` and has its
    own."""

    class Settings(VaryingGamma.Settings):
        gamma: int = Field(ge=1, le=LARGEST_GAMMA)

    def __init__(self, gamma: int, largest: int):
        super().__init__(largest)
        self.first = min(gamma, largest)
        self.gammas: dict[Sequence | None, int] = {}  # of the requests that have rows

    def next_gamma(self, state: State) -> list[int]:
        self.sequences = list(state.sequences)
        self.gammas = {sequence: self.gammas.get(sequence, self.first) for sequence in self.sequences}
        return [self.gammas[sequence] for sequence in self.sequences]

    def observe(self, drafted: list[int], kept: list[int]) -> None:
        for sequence, guesses, new in zip(self.sequences, drafted, kept, strict=True):
            if new:
                wanted = self.gammas[sequence] + (2 if new == guesses + 1 else -1)
                self.gammas[sequence] = min(max(wanted, 1), self.largest)
