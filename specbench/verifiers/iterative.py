"""Iterative speculative sampling (SpecInfer): tries the children of a node in turn.

Each rejection replaces p by norm(max(0, p - q)).
"""

from dataclasses import replace
from typing import Literal

from torch import Tensor

from specbench.decoding.draft import Draft, Verdict
from specbench.decoding.noise import Noise
from specbench.decoding.verify_tree import iterative_beta, iterative_sampling, match, match_beta
from specbench.verifiers.base import Verifier


class IterativeVerifier(Verifier):
    """Exact for trees and chains; on a chain it is Algorithm 1. Point masses, and at temperature 0 all guesses, are
    accepted if a draw from p is one of them, which has the same acceptance probability and output distribution."""

    trees = True
    keeps_guess: Literal["p / q", "p"] | None = "p / q"

    def accept(self, p: Tensor, draft: Draft, noise: Noise) -> Verdict:
        if self.greedy or draft.probs is None:
            return match(p, draft, None if self.greedy else noise.bits)
        return iterative_sampling(p, draft, noise.r, noise.bits)

    def beta(self, p: Tensor, draft: Draft, verdict: Verdict) -> Tensor:
        if self.greedy or draft.probs is None:
            return match_beta(p, replace(draft, probs=None), verdict)
        return iterative_beta(p, draft, verdict)
