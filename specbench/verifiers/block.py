"""Block verification (Sun et al. 2024): judges all guesses of a chain together, and accepts more of them."""

from torch import Tensor

from specbench.decoding.draft import Draft, Verdict
from specbench.decoding.noise import Noise
from specbench.decoding.verify import acceptance_probability, block_verification, greedy_matching
from specbench.verifiers.base import Verifier


class BlockVerifier(Verifier):
    """Exact for chains. A verdict depends on guesses after the accepted ones too, so every round renews the noise."""

    looks_ahead = True

    def accept(self, p: Tensor, draft: Draft, noise: Noise) -> Verdict:
        if self.greedy:
            return greedy_matching(p, draft)
        return block_verification(p, draft, noise.r, noise.bits)

    def beta(self, p: Tensor, draft: Draft, verdict: Verdict) -> Tensor:
        """sum_x min(p, q) [B, N] as for speculative sampling (Theorem 3.5), although blocks are accepted more often."""
        return acceptance_probability(p[:, :-1], draft, 1.0, self.greedy)
