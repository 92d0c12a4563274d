"""Non-iterative rejection sampling (A.2): exact, but accepts less often than speculative sampling."""

from torch import Tensor

from specbench.decoding.draft import Draft, Verdict
from specbench.decoding.noise import Noise
from specbench.decoding.verify import acceptance_probability, greedy_matching, rejection_rate, rejection_sampling
from specbench.verifiers.base import Verifier


class RejectionVerifier(Verifier):
    """Accepts with probability p(x) / (M q(x)), M = max p / q (A.2). Needs a q that is no point mass: there M is
    infinite, and nothing would be accepted."""

    needs_q = True
    rule = "1 / M with M = max p / q"

    def accept(self, p: Tensor, draft: Draft, noise: Noise) -> Verdict:
        if self.greedy:
            return greedy_matching(p, draft)
        return rejection_sampling(p, draft, noise.r, noise.bits)

    def beta(self, p: Tensor, draft: Draft, verdict: Verdict) -> Tensor:
        if self.greedy or draft.probs is None:
            return acceptance_probability(p[:, :-1], draft, 1.0, self.greedy)
        return rejection_rate(p[:, :-1], draft.probs)
