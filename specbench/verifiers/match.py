"""Accepts a guess that equals a draw from p: the rule of engines that do not keep q."""

from torch import Tensor

from specbench.decoding.draft import Draft, Verdict
from specbench.decoding.noise import Noise
from specbench.decoding.verify_tree import match, match_beta
from specbench.verifiers.base import Verifier


class MatchVerifier(Verifier):
    """Exact for every draft, and the text is that of plain decoding with the same seed. A guess is accepted with
    probability sum_x p(x) q(x), which is at most speculative sampling's sum_x min(p, q) (Theorem 3.5)."""

    trees = True
    keeps_guess = "p"
    rule = "sum p q"

    def accept(self, p: Tensor, draft: Draft, noise: Noise) -> Verdict:
        return match(p, draft, None if self.greedy else noise.bits)

    def beta(self, p: Tensor, draft: Draft, verdict: Verdict) -> Tensor:
        return match_beta(p, draft, verdict)


class GreedyTreeVerifier(MatchVerifier):
    """Greedy verification of a tree (SpecInfer), for temperature 0: accepts the guesses that are the target's argmaxes.
    At most one child of a node is, so this finds the longest accepted path."""

    only_greedy = True
