"""Tokens at random: the paper's limiting case (section 3.6), which still gains a little."""

from dataclasses import dataclass

import torch
from torch import Tensor

from specbench.context import Context
from specbench.decoding.noise import PROPOSAL, uniforms
from specbench.decoding.state import Draft, State, window
from specbench.drafters.rows import UNLIMITED


class RandomDrafter:
    """Every token of the vocabulary is equally likely; q says so.

    At temperature 0 its guess is still random, and a point mass like every other guess there.
    """

    @dataclass
    class Settings:
        pass

    context = UNLIMITED
    operations_per_token = 0

    def __init__(self, settings: Settings, context: Context):
        self.vocab_size, self.greedy = context.target.vocab_size, context.sampling.greedy

    def begin(self, state: State) -> None:
        pass

    def propose(self, state: State, gamma: list[int]) -> Draft:
        uniform = uniforms(window(state.noise[PROPOSAL], state.length, max(gamma)))
        tokens = (uniform * self.vocab_size).long()
        q: Tensor | None = None
        if not self.greedy:
            q = torch.full((*tokens.shape, self.vocab_size), 1 / self.vocab_size, device=tokens.device)
        return Draft.chain(tokens, q, torch.tensor(gamma, device=tokens.device))
