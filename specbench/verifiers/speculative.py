"""The paper's verifier: speculative sampling (section 2.3) with lenience (A.5)."""

from typing import Any

from torch import Tensor

from specbench.decoding.draft import Draft, Verdict
from specbench.decoding.noise import Noise
from specbench.decoding.sampling import Sampling
from specbench.decoding.verify import acceptance_probability, greedy_matching, speculative_sampling
from specbench.verifiers.base import Verifier


class SpeculativeVerifier(Verifier):
    """Algorithm 1's acceptance rule for chains; exact for lenience 1."""

    takes_lenience = True
    judges_by_position = True  # beta is sum_x min(p / l, q)
    keeps_guess = "p / q"

    def __init__(self, sampling: Sampling, lenience: float = 1.0):
        super().__init__(sampling.greedy)
        self.lenience, self.lossless = lenience, lenience == 1
        self.rule = self.rule if lenience == 1 else "sum min(p / l, q)"

    @classmethod
    def from_settings(cls, settings: Any, sampling: Sampling, lenience: float) -> "SpeculativeVerifier":
        return cls(sampling, lenience)

    def accept(self, p: Tensor, draft: Draft, noise: Noise) -> Verdict:
        if self.greedy:
            return greedy_matching(p, draft, self.lenience)
        return speculative_sampling(p, draft, noise.r, noise.bits, self.lenience)

    def beta(self, p: Tensor, draft: Draft, verdict: Verdict) -> Tensor:
        return acceptance_probability(p[:, :-1], draft, self.lenience, self.greedy)
