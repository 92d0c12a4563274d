"""The paper's verifier: speculative sampling (section 2.3) with lenience (A.5)."""

from dataclasses import dataclass

from torch import Tensor

from specbench.context import Context
from specbench.decoding.sampling import Sampling
from specbench.decoding.state import Draft, State, Verdict
from specbench.decoding.verify import acceptance_probability, greedy_matching, speculative_sampling


class SpeculativeVerifier:
    """Algorithm 1's acceptance rule; exact for lenience 1."""

    @dataclass
    class Settings:
        pass

    def __init__(self, settings: Settings, context: Context):
        self.sampling, self.lenience = context.sampling, context.lenience

    @classmethod
    def of(cls, sampling: Sampling) -> "SpeculativeVerifier":
        """For a target with this sampling, without lenience."""
        verifier = cls.__new__(cls)
        verifier.sampling, verifier.lenience = sampling, 1.0
        return verifier

    judges_by_law = True  # acceptance is min(p / l, q) of the two laws
    looks_ahead = False
    trees = False

    @property
    def lossless(self) -> bool:
        """Whether the output law is the target's own."""
        return self.lenience == 1

    def under(self, state: State) -> "SpeculativeVerifier":
        """The same rule in every round."""
        return self

    def accept(self, p: Tensor, draft: Draft, noise) -> Verdict:
        """p [B, N+1, V] from the target, the draft, and this round's randomness."""
        if self.sampling.greedy:
            return greedy_matching(p, draft, self.lenience)
        return speculative_sampling(p, draft, noise.r, noise.bits, self.lenience)

    def beta(self, p: Tensor, draft: Draft, verdict: Verdict) -> Tensor:
        """[B, N], the probability that each guess is accepted: what alpha is the mean of."""
        return acceptance_probability(p[:, :-1], draft, self.lenience, self.sampling.greedy)
