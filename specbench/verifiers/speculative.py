"""Verifiers of chains: the paper's speculative sampling (section 2.3) with lenience (A.5), block verification (Sun et
al. 2024) and non-iterative rejection sampling (A.2)."""

from typing import Any

from torch import Tensor

from specbench.decoding import verify
from specbench.decoding.draft import Draft, Verdict
from specbench.decoding.noise import Noise
from specbench.decoding.sampling import Sampling
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
            return verify.greedy_matching(p, draft, self.lenience)
        return verify.speculative_sampling(p, draft, noise.r, noise.bits, self.lenience)

    def beta(self, p: Tensor, draft: Draft, verdict: Verdict) -> Tensor:
        return verify.acceptance_probability(p[:, :-1], draft, self.lenience, self.greedy)


class BlockVerifier(Verifier):
    """Judges all guesses of a chain together (block verification), and accepts more of them. Exact. A verdict depends
    on guesses after the accepted ones too, so every round renews the noise."""

    looks_ahead = True

    def accept(self, p: Tensor, draft: Draft, noise: Noise) -> Verdict:
        if self.greedy:
            return verify.greedy_matching(p, draft)
        return verify.block_verification(p, draft, noise.r, noise.bits)

    def beta(self, p: Tensor, draft: Draft, verdict: Verdict) -> Tensor:
        """sum_x min(p, q) [B, N] as for speculative sampling (Theorem 3.5), although blocks are accepted more often."""
        return verify.acceptance_probability(p[:, :-1], draft, 1.0, self.greedy)


class RejectionVerifier(Verifier):
    """Accepts with probability p(x) / (M q(x)), M = max p / q (A.2): exact, but accepts less often than speculative
    sampling. Needs a q that is no point mass: there M is infinite, and nothing would be accepted."""

    needs_q = True
    rule = "1 / M with M = max p / q"

    def accept(self, p: Tensor, draft: Draft, noise: Noise) -> Verdict:
        if self.greedy:
            return verify.greedy_matching(p, draft)
        return verify.rejection_sampling(p, draft, noise.r, noise.bits)

    def beta(self, p: Tensor, draft: Draft, verdict: Verdict) -> Tensor:
        if self.greedy or draft.probs is None:
            return verify.acceptance_probability(p[:, :-1], draft, 1.0, self.greedy)
        return verify.rejection_rate(p[:, :-1], draft.probs)
