"""Typical acceptance (Medusa): guesses that the target finds likely enough. Not exact."""

from dataclasses import dataclass

import torch
from torch import Tensor

from specbench.context import Context
from specbench.decoding.noise import constant
from specbench.decoding.protocols import Noise
from specbench.decoding.sampling import draw
from specbench.decoding.state import Draft, Verdict
from specbench.decoding.tree import parents
from specbench.decoding.verify_tree import longest_path
from specbench.settings import setting
from specbench.verifiers.rule import Rule


class TypicalVerifier(Rule):
    """Accepts x where p(x) >= min(epsilon, delta exp(-H(p))); of all paths the longest is kept. At
    temperature 0, where p is the argmax alone, nothing is lost."""

    lossless = False

    @dataclass
    class Settings:
        epsilon: float = setting(gt=0, le=1)
        delta: float = setting(gt=0, le=1)

    def __init__(self, settings: Settings, context: Context):
        super().__init__(settings, context)
        self.note = "typical acceptance is not exact: the text is not drawn from the target's law"

    def accept(self, p: Tensor, draft: Draft, noise: Noise) -> Verdict:
        def choose(law: Tensor, n: Tensor) -> Tensor:
            return law.argmax(-1) if self.greedy else draw(law, noise.bits.gather(1, n[:, None])[:, 0])

        law = p[:, constant(parents)(draft.parent, p.device)]  # [B, N, V], before each guess
        passes = law.gather(-1, draft.tokens[..., None])[..., 0] >= self._threshold(law)
        return longest_path(p, draft, passes, choose)

    def _threshold(self, law: Tensor) -> Tensor:
        typical = self.settings.delta * (-torch.special.entr(law).sum(-1)).exp()
        return typical.clamp(max=self.settings.epsilon)

    def beta(self, p: Tensor, draft: Draft, verdict: Verdict) -> Tensor:
        """[B, D]: whether the guess that was tried at each step passes."""
        steps = torch.arange(draft.depth, device=p.device)
        return (steps < verdict.accepted[:, None]).to(p.dtype)
