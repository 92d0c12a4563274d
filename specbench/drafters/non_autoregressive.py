"""Drafters that guess gamma tokens in one call: no guess knows what the others are."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specbench.context import Context
from specbench.decoding.draft import Draft
from specbench.decoding.drafter import Drafter
from specbench.decoding.gamma_policy import DraftStop
from specbench.decoding.noise import PROPOSAL
from specbench.decoding.sampling import Sampling, draw
from specbench.decoding.state import Rows, State, seen_tokens, window
from specbench.drafters.model import ModelSettings, fit_logits, load_drafter
from specbench.models.language_model import LanguageModel
from specbench.models.lookahead import LookAhead
from specbench.models.pretrained import load_extras
from specbench.settings import setting


class ParallelDrafter(Drafter):
    """Guesses all tokens of a draft in one call. Subclasses return the logits of all guesses."""

    reads_text = False  # q at a position depends on where its round began
    sampling: Sampling
    vocab_size: int  # the target's
    longest: int
    usual = 0  # guesses to ask for at least

    @abstractmethod
    def logits(self, state: State, steps: int) -> Tensor:
        """[B, steps, V], of the guesses x_1 .. x_steps."""

    def can_guess(self, state: State) -> list[bool]:
        """Rows that have what a guess needs."""
        return [True] * state.batch_size

    def propose(self, state: State, gamma: list[int]) -> Draft:
        gamma = [min(g, self.longest) if able else 0 for g, able in zip(gamma, self.can_guess(state), strict=True)]
        if max(gamma) == 0:
            return Draft.empty(state.batch_size, state.tokens.device)
        # Near the end of a text as many as ever, since where shapes are compiled few are to occur.
        steps = max(max(gamma), self.usual)
        logits = self.logits(state, steps)[:, : max(gamma)]
        tokens, q = self._draw(logits, state.rows, self._seen(state))
        return Draft.chain(tokens, q, torch.tensor(gamma, device=tokens.device))

    def _draw(self, logits: Tensor, rows: Rows, seen: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if self.sampling.greedy:
            return self.sampling.penalize(logits, seen).argmax(-1), None
        q = self.sampling.probabilities(logits, seen)
        return draw(q, window(rows.noise[PROPOSAL], rows.length, logits.shape[1])), q

    def _seen(self, state: State) -> Tensor | None:
        """[B, 1, V]: the penalty knows the text, but none of the guesses."""
        if self.sampling.repetition_penalty == 1:
            return None
        return seen_tokens(state.tokens, state.length, self.vocab_size)[:, None]


class NonAutoregressiveDrafter(ParallelDrafter):
    """A model with trained look-ahead embeddings (`python -m specbench.train method=pass`) behind the text.

    The call reads as many committed tokens as a round can have added, so that it needs no other.
    """

    reads = 2  # tokens, for each guess

    @dataclass
    class Settings(ModelSettings):
        lookahead: str = setting(required="a folder of look-ahead embeddings")

    def __init__(self, model: LanguageModel, lookahead: LookAhead, vocab_size: int, gamma: int):
        """`vocab_size` is the target's, and `gamma` how much will usually be drafted."""
        self.model, self.lookahead, self.sampling = model, lookahead, model.sampling
        self.vocab_size, self.context = vocab_size, model.context
        self.longest = lookahead.config.count + 1
        self.usual = min(gamma, self.longest) if model.executor.fixed_shapes else 0
        self.operations_per_token = model.operations_per_token * self.reads
        self.models = [model]

    @classmethod
    def from_settings(cls, settings: Any, context: Context, target: LanguageModel) -> "NonAutoregressiveDrafter":
        model = load_drafter(settings, context)
        lookahead = load_extras(LookAhead, settings.lookahead, "drafter.lookahead", model)
        return cls(model, lookahead, target.vocab_size, context.gamma)

    def begin(self, state: State, stop: DraftStop | None = None) -> None:
        self.model.allocate(state.batch_size, state.tokens.shape[1])

    def logits(self, state: State, steps: int) -> Tensor:
        width = self._text_width(state)
        starts = [length - width for length in state.lengths]
        visible = self.model.make_room(starts, width + steps - 1, state.active)
        ahead = self.lookahead.embeddings[: steps - 1]
        logits: Tensor = self.model.executor.leaf(self._logits, self.model)(state.rows, ahead, width, visible)
        return logits

    def _logits(self, rows: Rows, ahead: Tensor, width: int, visible: int) -> Tensor:
        """After the last `width` tokens of the text and each of the embeddings [K, H]: [B, 1 + K, V]."""
        first = (rows.length - width).clamp(min=0)
        embed: Any = self.model.module.get_input_embeddings()
        text = embed(window(rows.tokens, first, width))
        x = torch.cat([text, ahead.expand(len(text), -1, -1).to(text.dtype)], 1)
        logits = self.model.forward(x, first, visible)[:, width - 1 :]
        return fit_logits(logits, self.vocab_size).float()

    def _text_width(self, state: State) -> int:
        """Committed tokens to read: what a round adds at most, and everything before is in the cache."""
        shortest = min(length for length, on in zip(state.lengths, state.active, strict=True) if on)
        width = min(self.longest + 1, shortest)
        self.model.catch_up(state, width)
        self.model.cached = [min(c, n - 1) for c, n in zip(self.model.cached, state.lengths, strict=True)]
        return width
