"""Verifiers of token trees, exact for chains too: iterative speculative sampling (SpecInfer), traversal verification
(2505.12398), and matching, the rule of engines that do not keep q."""

from dataclasses import replace
from typing import Literal

from torch import Tensor

from specbench.decoding.draft import Draft, Verdict
from specbench.decoding.noise import Noise
from specbench.decoding.verify import block_verification
from specbench.decoding.verify_tree import iterative_beta, iterative_sampling, match, match_beta, traversal_sampling
from specbench.verifiers.base import Verifier


class MatchVerifier(Verifier):
    """Accepts a guess that equals a draw from p. Exact for every draft, and the text is that of plain decoding with the
    same seed. A guess is accepted with probability sum_x p(x) q(x), which is at most speculative sampling's
    sum_x min(p, q) (Theorem 3.5)."""

    trees = True
    keeps_guess: Literal["p / q", "p"] | None = "p"
    rule = "sum p q"

    def accept(self, p: Tensor, draft: Draft, noise: Noise) -> Verdict:
        return match(p, draft, None if self.greedy else noise.bits)

    def beta(self, p: Tensor, draft: Draft, verdict: Verdict) -> Tensor:
        return match_beta(p, draft, verdict)


class GreedyTreeVerifier(MatchVerifier):
    """Greedy verification of a tree (SpecInfer), for temperature 0: accepts the guesses that are the target's argmaxes.
    At most one child of a node is, so this finds the longest accepted path."""

    only_greedy = True


class IterativeVerifier(MatchVerifier):
    """Tries the children of a node in turn; each rejection replaces p by norm(max(0, p - q)). On a chain it is
    Algorithm 1. Point masses, and at temperature 0 all guesses, are accepted if a draw from p is one of them, which has
    the same acceptance probability and output distribution."""

    keeps_guess: Literal["p / q", "p"] | None = "p / q"
    rule = Verifier.rule

    def accept(self, p: Tensor, draft: Draft, noise: Noise) -> Verdict:
        if self.greedy or draft.probs is None:
            return super().accept(p, draft, noise)
        return iterative_sampling(p, draft, noise.r, noise.bits)

    def beta(self, p: Tensor, draft: Draft, verdict: Verdict) -> Tensor:
        if self.greedy or draft.probs is None:
            return super().beta(p, replace(draft, probs=None), verdict)
        return iterative_beta(p, draft, verdict)


class TraversalVerifier(IterativeVerifier):
    """Judges the guesses of a tree together, leaves first (traversal verification). It is block verification on chains.
    If the children of a node were drawn without replacement, it keeps at least as many guesses in expectation as
    `IterativeVerifier`. Point masses, and at temperature 0 all guesses, are judged as there: no exact rule keeps more
    of them. A verdict depends on guesses that are not kept, so every round renews the noise. `beta` is that of
    `IterativeVerifier`: alpha stays a number of the two models and the tree."""

    looks_ahead = True
    keeps_guess = None

    def accept(self, p: Tensor, draft: Draft, noise: Noise) -> Verdict:
        if self.greedy or draft.probs is None:
            return super().accept(p, draft, noise)
        return (block_verification if draft.is_chain else traversal_sampling)(p, draft, noise.r, noise.bits)
