"""Accepts a guess that equals a draw from p: what engines do that keep no q."""

from torch import Tensor

from specbench.decoding.protocols import Noise
from specbench.decoding.state import Draft, Verdict
from specbench.decoding.verify_tree import match, match_beta
from specbench.verifiers.rule import Rule


class MatchVerifier(Rule):
    """Exact whatever the draft is, and the text is that of plain decoding with the same seed; but two
    draws meet with probability sum_x p(x) q(x) only, where speculative sampling accepts sum_x min(p, q)."""

    def accept(self, p: Tensor, draft: Draft, noise: Noise) -> Verdict:
        return match(p, draft, None if self.greedy else noise.bits)

    def beta(self, p: Tensor, draft: Draft, verdict: Verdict) -> Tensor:
        return match_beta(p, draft, verdict)
