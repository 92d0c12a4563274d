"""Tokens at random: the paper's theoretical case, which still guarantees a small improvement (section 3.6)."""

from typing import Any

import torch
from torch import Tensor

from specbench.decoding.draft import Draft
from specbench.decoding.noise import PROPOSAL, uniforms
from specbench.decoding.rows import window
from specbench.decoding.state import State
from specbench.decoding.transfers import counts
from specbench.drafters.base import Drafter
from specbench.models.context import Context
from specbench.models.language_model import LanguageModel


class RandomDrafter(Drafter):
    """Draws every guess uniformly from the vocabulary: q(x) = 1 / V. At temperature 0 the guess is random too, and a
    point mass like all guesses there."""

    def __init__(self, vocab_size: int, greedy: bool):
        self.vocab_size, self.greedy = vocab_size, greedy

    @classmethod
    def from_settings(cls, settings: Any, context: Context, target: LanguageModel) -> "RandomDrafter":
        return cls(target.vocab_size, context.sampling.greedy)

    def propose(self, state: State, gamma: list[int]) -> Draft:
        uniform = uniforms(window(state.noise[PROPOSAL], state.length, max(gamma)))
        tokens = (uniform * self.vocab_size).long()
        q: Tensor | None = None
        if not self.greedy:
            q = torch.full((*tokens.shape, self.vocab_size), 1 / self.vocab_size, device=tokens.device)
        return Draft.chain(tokens, q, counts(tuple(gamma), tokens.device))
