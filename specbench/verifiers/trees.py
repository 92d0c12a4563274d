"""Verifiers of token trees, and of chains: iterative speculative sampling (SpecInfer), traversal verification
(2505.12398), matching, the rule of engines that do not keep q; and typical acceptance (Medusa), which is not exact."""

from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from specbench.decoding import verify_tree
from specbench.decoding.draft import Draft, Verdict
from specbench.decoding.noise import Noise
from specbench.decoding.sampling import draw
from specbench.decoding.token_tree import ROOT
from specbench.settings import BaseSettings
from specbench.verifiers.base import Verifier
from specbench.verifiers.chains import block_verification


class MatchVerifier(Verifier):
    """Accepts a guess that equals a draw from p. Exact for every draft, and the text is that of plain decoding with the
    same seed. A guess is accepted with probability sum_x p(x) q(x), which is at most speculative sampling's
    sum_x min(p, q) (Theorem 3.5)."""

    trees = True
    keeps_guess: Literal["p / q", "p"] | None = "p"
    rule = "sum p q"

    def accept(self, p: Tensor, draft: Draft, noise: Noise) -> Verdict:
        return verify_tree.match(p, draft, None if self.greedy else noise.bits)

    def beta(self, p: Tensor, draft: Draft, verdict: Verdict) -> Tensor:
        return verify_tree.match_beta(p, draft, verdict)


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
        return verify_tree.iterative_sampling(p, draft, noise.r, noise.bits)

    def beta(self, p: Tensor, draft: Draft, verdict: Verdict) -> Tensor:
        if self.greedy or draft.probs is None:
            return super().beta(p, replace(draft, probs=None), verdict)
        return verify_tree.iterative_beta(p, draft, verdict)


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
        return (block_verification if draft.is_chain else verify_tree.traversal_sampling)(p, draft, noise.r, noise.bits)


class TypicalVerifier(Verifier):
    """Accepts x where p(x) >= min(epsilon, delta exp(-H(p))); the longest path (Medusa). Exact at temperature 0."""

    trees = True
    lossless = False
    rule = "q of the tokens that pass"
    note = "typical acceptance is not exact: the text is not drawn from the target's distribution"

    class Settings(BaseSettings):
        epsilon: float = Field(ge=1e-6, le=1)
        delta: float = Field(ge=1e-6, le=1)

    def __init__(self, greedy: bool, epsilon: float, delta: float):
        super().__init__(greedy)
        self.epsilon, self.delta = epsilon, delta

    def accept(self, p: Tensor, draft: Draft, noise: Noise) -> Verdict:
        def choose(p_next: Tensor, n: Tensor) -> Tensor:
            return p_next.argmax(-1) if self.greedy else draw(p_next, noise.bits.gather(1, n[:, None])[:, 0])

        above = draft.parents.clamp(min=ROOT).expand(len(p), -1)
        p_above = p.gather(1, above[..., None].expand(-1, -1, p.shape[-1]))  # [B, N, V], p at each guess's parent
        passes = p_above.gather(-1, draft.tokens[..., None])[..., 0] >= self._threshold(p_above)
        return verify_tree.longest_path(p, draft, passes, choose)

    def _threshold(self, p_above: Tensor) -> Tensor:
        """min(epsilon, delta exp(-H(p))) [B, N], from p_above [B, N, V]."""
        H: Tensor = torch.special.entr(p_above).sum(-1)
        typical = self.delta * (-H).exp()
        return typical.clamp(max=self.epsilon)

    def beta(self, p: Tensor, draft: Draft, verdict: Verdict) -> Tensor:
        """[B, D]: on a chain with a q, the sum of q(x) over the x that pass; else 1 where the step was taken, and 0."""
        if draft.is_chain and draft.probs is not None:
            p_above = p[:, :-1]
            return (draft.probs * (p_above >= self._threshold(p_above)[..., None])).sum(-1)
        steps = torch.arange(draft.depth, device=p.device)
        return (steps < verdict.accepted[:, None]).to(p.dtype)
