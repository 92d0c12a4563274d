"""Accepts at a given rate, no matter what the models compute: for timing an engine without trained weights."""

from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from specbench.decoding.draft import Draft, Verdict
from specbench.decoding.noise import Noise
from specbench.decoding.sampling import draw
from specbench.decoding.verify import at_row, leading, verdict_of
from specbench.settings import BaseSettings
from specbench.verifiers.base import Verifier


class SyntheticVerifier(Verifier):
    """Accepts each guess with probability `alpha`, then adds a token drawn from p. Never lossless."""

    judged = False
    lossless = False

    class Settings(BaseSettings):
        alpha: float = Field(ge=0, le=1)

    def __init__(self, greedy: bool, alpha: float):
        super().__init__(greedy)
        self.alpha = alpha
        self.rule = f"{alpha:g}, as asked"
        self.note = f"acceptance was drawn at rate {alpha:g}: times are real, text and alpha are not"

    def accept(self, p: Tensor, draft: Draft, noise: Noise) -> Verdict:
        n = leading(noise.r < self.alpha, draft.count)
        p_next = at_row(p, n)
        t = p_next.argmax(-1) if self.greedy else draw(p_next, noise.bits.gather(1, n[:, None]).squeeze(1))
        return verdict_of(draft.tokens, n, t)

    def acceptance_rule(self, drafter: type[Any], settings: Any) -> str:
        return self.rule

    def beta(self, p: Tensor, draft: Draft, verdict: Verdict) -> Tensor:
        return torch.full_like(draft.tokens, self.alpha, dtype=torch.float64)
