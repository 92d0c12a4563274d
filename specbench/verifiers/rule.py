"""What the verifiers without lenience share."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from specbench.context import Context
from specbench.decoding.protocols import Noise
from specbench.decoding.state import Draft, State, Verdict


class Rule(ABC):
    """The same rule in every round. Exact unless a subclass says otherwise."""

    lossless = True
    lenience = 1.0
    judges_by_law = False
    looks_ahead = False
    trees = True  # whether it can judge drafts that are not chains

    @dataclass
    class Settings:
        pass

    def __init__(self, settings: Settings, context: Context):
        self.settings, self.greedy = settings, context.sampling.greedy

    def under(self, state: State) -> "Rule":
        return self

    @abstractmethod
    def accept(self, p: Tensor, draft: Draft, noise: Noise) -> Verdict:
        """p [B, N+1, V] from the target, the draft, and this round's randomness."""

    @abstractmethod
    def beta(self, p: Tensor, draft: Draft, verdict: Verdict) -> Tensor:
        """[B, D], the probability that a guess is accepted at each step of the way."""
