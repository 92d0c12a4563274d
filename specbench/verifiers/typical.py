"""Typical acceptance (Medusa): accepts guesses that the target finds probable enough. Not exact."""

import torch
from pydantic import Field
from torch import Tensor

from specbench.decoding.draft import Draft, Verdict
from specbench.decoding.noise import Noise
from specbench.decoding.sampling import draw
from specbench.decoding.token_tree import ROOT
from specbench.decoding.verify_tree import longest_path
from specbench.settings import BaseSettings
from specbench.verifiers.base import Verifier


class TypicalVerifier(Verifier):
    """Accepts x where p(x) >= min(epsilon, delta exp(-H(p))), and keeps the longest path (Medusa). Exact at temperature
    0, where p is one-hot."""

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
        return longest_path(p, draft, passes, choose)

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
