"""Iterative speculative sampling (SpecInfer): siblings are tried in turn, against what the last one left of p."""

from torch import Tensor

from specbench.decoding.protocols import Noise
from specbench.decoding.state import Draft, Verdict
from specbench.decoding.verify_tree import iterative_beta, iterative_sampling, match, match_beta
from specbench.verifiers.rule import Rule


class IterativeVerifier(Rule):
    """Exact for trees and chains; of a chain it makes Algorithm 1. Guesses without a law, and any at
    temperature 0, are accepted where p's own draw is one of them, which for point masses is the same."""

    def accept(self, p: Tensor, draft: Draft, noise: Noise) -> Verdict:
        if self.greedy or draft.probs is None:
            return match(p, draft, None if self.greedy else noise.bits)
        return iterative_sampling(p, draft, noise.r, noise.bits)

    def beta(self, p: Tensor, draft: Draft, verdict: Verdict) -> Tensor:
        if self.greedy or draft.probs is None:
            return match_beta(p, Draft(draft.tokens, draft.parent, None, draft.count), verdict)
        return iterative_beta(p, draft, verdict)
