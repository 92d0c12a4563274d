"""FLy (2511.22972): accepts a rejected guess where p is uncertain and the guesses after it are accepted. Not exact."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from specbench.decoding.draft import Draft, Verdict
from specbench.decoding.noise import Noise
from specbench.decoding.verifier import Verifier
from specbench.decoding.verify import acceptance_probability, at_row, leading, speculative_sampling, verdict
from specbench.settings import BaseSettings, setting

LIKELIEST = 3  # tokens whose probabilities say how uncertain p is


class FlyVerifier(Verifier):
    """Accepts a guess x that Algorithm 1, or at temperature 0 the argmax, rejects if p(x) > 0, the entropy of the three
    largest probabilities (not renormalised, in nats) is at least `entropy`, and each of the next `window` guesses is
    accepted. At temperature 0 it reads p before argmax."""

    lossless = False  # but for short drafts
    looks_ahead = True
    accepts_with_beta = False
    before_argmax = True

    @dataclass
    class Settings(BaseSettings):
        window: int = setting(ge=1)
        entropy: float = setting(ge=0)

    def __init__(self, greedy: bool, window: int, entropy: float):
        super().__init__(greedy)
        self.window, self.entropy = window, entropy
        self.note = "fly is not exact: the text is not drawn from the target's law"

    def expect(self, gamma: int) -> None:
        if gamma <= self.window:  # no guess has so many others behind it
            self.lossless = True
            self.note = f"drafts of at most verifier.window={self.window} guesses are judged exactly by fly"

    def accept(self, p: Tensor, draft: Draft, noise: Noise) -> Verdict:
        good = self.accepts(p, draft, noise.r)
        if self.greedy:
            n = leading(good, draft.count)
            return verdict(draft.tokens, n, at_row(p, n).argmax(-1))
        return speculative_sampling(p, draft, torch.where(good, 0.0, torch.inf), noise.bits)

    def accepts(self, p: Tensor, draft: Draft, r: Tensor) -> Tensor:
        """[B, N] bool: which guesses are accepted, whatever becomes of those before. p [B, N + 1, V], r [B, N]."""
        law, x = p[:, :-1], draft.tokens[..., None]
        p_x, q_x = law.gather(-1, x)[..., 0], 1.0 if draft.probs is None else draft.probs.gather(-1, x)[..., 0]
        own: Tensor = (p_x >= law.amax(-1) if self.greedy else r * q_x < p_x) & draft.exists()
        following = F.pad(own, (0, self.window)).unfold(1, self.window, 1)[:, 1:].all(-1)
        entropy: Tensor = torch.special.entr(law.topk(min(LIKELIEST, law.shape[-1])).values).sum(-1)
        return own | ((entropy >= self.entropy) & (p_x > 0) & following)

    def beta(self, p: Tensor, draft: Draft, verdict: Verdict) -> Tensor:
        """As for speculative sampling (Theorem 3.5) [B, N], although more guesses are accepted."""
        return acceptance_probability(p[:, :-1], draft, 1.0, self.greedy)
