"""Acceptance drawn at a given rate, whatever the models say: for timing an engine without weights."""

from dataclasses import dataclass

import torch
from torch import Tensor

from specbench.context import Context
from specbench.decoding.sampling import draw
from specbench.decoding.state import Draft, State, Verdict
from specbench.decoding.verify import at_row, leading, verdict
from specbench.settings import setting


class SyntheticVerifier:
    """Accepts each guess with probability `alpha`, then adds a token from p. Never lossless."""

    lossless = False
    lenience = 1.0
    judges_by_law = False
    looks_ahead = False
    trees = False

    @dataclass
    class Settings:
        alpha: float = setting(ge=0, le=1)

    def __init__(self, settings: Settings, context: Context):
        self.alpha, self.greedy = settings.alpha, context.sampling.greedy
        self.note = f"acceptance was drawn at rate {self.alpha:g}: times are real, text and alpha are not"

    def under(self, state: State) -> "SyntheticVerifier":
        """The same rule in every round."""
        return self

    def accept(self, p: Tensor, draft: Draft, noise) -> Verdict:
        """p [B, N+1, V] from the target, the draft, and this round's randomness."""
        n = leading(noise.r < self.alpha, draft.count)
        p_next = at_row(p, n)
        t = p_next.argmax(-1) if self.greedy else draw(p_next, noise.bits.gather(1, n[:, None]).squeeze(1))
        return verdict(draft.tokens, n, t)

    def beta(self, p: Tensor, draft: Draft, verdict: Verdict) -> Tensor:
        """[B, N], the probability that each guess is accepted: what alpha is the mean of."""
        return torch.full_like(draft.tokens, self.alpha, dtype=torch.float64)
