"""Other verifiers of chains: block verification (Sun et al. 2024) and non-iterative rejection sampling (A.2)."""

from torch import Tensor

from specbench.decoding import verify
from specbench.decoding.draft import Draft, Verdict
from specbench.decoding.noise import Noise
from specbench.verifiers.base import Verifier


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
