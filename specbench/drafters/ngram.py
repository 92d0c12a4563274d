"""N-gram drafter (section 3.6): tables of the tokens of the prompt and the text so far, without model or training."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from specbench.decoding.draft import Draft
from specbench.decoding.sampling import Sampling
from specbench.decoding.state import State
from specbench.drafters.lookup_base import CountDrafter, committed, point_mass_chain
from specbench.drafters.sampling_overrides import OwnSampling
from specbench.errors import ConfigError
from specbench.models.context import Context
from specbench.models.language_model import LanguageModel
from specbench.policies.base import GammaPolicy


class NgramTable:
    """Counts, for each context among the last `window` tokens of one row, the tokens that followed it. An n-gram of
    order k is a context of k - 1 tokens and the token that followed it."""

    def __init__(self, min_order: int, max_order: int, window: int):
        # Longest context first; n-grams longer than the window cannot occur in it.
        self.orders = range(min(max_order, window), min_order - 1, -1)
        self.window = window
        self.tokens: list[int] = []
        self.followers: dict[tuple[int, ...], dict[int, int]] = defaultdict(dict)

    def read(self, tokens: Sequence[int]) -> None:
        """Counts the tokens that are new since the last call and uncounts those that left the window. Tokens counted
        before that are not in the text any more (rejected inside `drafter=hierarchical`) are uncounted first."""
        while self.tokens != tokens[: len(self.tokens)]:
            self._take_back()
        for token in tokens[len(self.tokens) :]:
            self.tokens.append(token)
            end, start = len(self.tokens) - 1, len(self.tokens) - 1 - self.window
            for order in self.orders:
                if end >= order - 1:
                    counts = self.followers[tuple(self.tokens[end - order + 1 : end])]
                    counts[token] = counts.pop(token, 0) + 1  # the most recent one moves to the end
                if start >= 0:
                    self._forget(start, order)

    def _take_back(self) -> None:
        """Undoes the last counted token; the n-grams that it pushed out of the window are counted again."""
        end, start = len(self.tokens) - 1, len(self.tokens) - 1 - self.window
        for order in self.orders:
            if end >= order - 1:
                self._forget(end - order + 1, order)
            if start >= 0:
                counts = self.followers[tuple(self.tokens[start : start + order - 1])]
                token = self.tokens[start + order - 1]
                counts[token] = counts.get(token, 0) + 1
        self.tokens.pop()

    def _forget(self, start: int, order: int) -> None:
        """Takes one from the count of the n-gram of this order that begins at `start`."""
        context = tuple(self.tokens[start : start + order - 1])
        token = self.tokens[start + order - 1]
        counts = self.followers[context]
        counts[token] -= 1
        if counts[token] == 0:
            del counts[token]
        if not counts:
            del self.followers[context]

    def following(self, tokens: Sequence[int]) -> dict[int, int] | None:
        """How often each token followed the longest known context at the end of `tokens`; None if none is known."""
        for order in self.orders:
            if len(tokens) >= order - 1 and (counts := self.followers.get(tuple(tokens[len(tokens) - order + 1 :]))):
                return counts
        return None


class NgramDrafter(CountDrafter):
    """Guesses the most frequent continuation of the longest known context, chained on its own guesses (section 3.6).
    With `sample` a guess is drawn from the counts instead, which then serve as q."""

    class Settings(OwnSampling):
        min_order: int = Field(ge=2, le=100)
        max_order: int = Field(ge=2, le=100)
        window: int = Field(ge=1, le=10**7)
        sample: bool

        def check(self, prefix: str) -> None:
            if self.min_order > self.max_order:
                raise ConfigError(
                    f"{prefix}min_order={self.min_order} is not allowed: "
                    f"it must be at most {prefix}max_order={self.max_order}"
                )

    @classmethod
    def point_masses(cls, settings: Settings) -> bool:
        return not settings.sample

    def __init__(
        self, min_order: int, max_order: int, window: int, sampled_as: Sampling | None = None, vocab_size: int = 0
    ):
        """`sampled_as` says how guesses are drawn from the counts; None takes the most frequent token."""
        super().__init__(vocab_size, sampled_as or Sampling(temperature=0))
        self.samples, self.limits = sampled_as is not None, (min_order, max_order, window)

    @classmethod
    def from_settings(cls, settings: Any, context: Context, target: LanguageModel) -> "NgramDrafter":
        sampling = settings.own(context).sampling
        sampled_as = sampling if settings.sample and not sampling.greedy else None
        return cls(settings.min_order, settings.max_order, settings.window, sampled_as, target.vocab_size)

    def begin(self, state: State, stop: GammaPolicy | None = None) -> None:
        self.tables = [NgramTable(*self.limits) for _ in range(state.batch_size)]
        self.request_ids = state.request_ids

    def propose(self, state: State, gamma: list[int]) -> Draft:
        texts, ids = committed(state), state.request_ids
        for row, text in enumerate(texts):
            if ids[row] != self.request_ids[row]:  # another request has the row now
                self.tables[row] = NgramTable(*self.limits)
            if state.active[row]:
                self.tables[row].read(text)
        self.request_ids = ids
        if self.samples:
            return self.propose_after(texts, state, gamma)
        rows = enumerate(zip(texts, gamma, strict=True))
        return point_mass_chain([self._most_frequent(row, text, wanted) for row, (text, wanted) in rows], state)

    def _most_frequent(self, row: int, tokens: list[int], gamma: int) -> list[int]:
        """The most frequent continuation; of equally frequent ones the most recent, which stands last."""
        text = list(tokens)
        while len(text) < len(tokens) + gamma and (counts := self.tables[row].following(text)):
            text.append(max(reversed(counts), key=counts.__getitem__))
        return text[len(tokens) :]

    def weights(self, row: int, tokens: Sequence[int]) -> Tensor | None:
        counts = self.tables[row].following(tokens)
        if counts is None:
            return None
        weights = torch.zeros(self.vocab_size)
        weights[list(counts)] = torch.tensor(list(counts.values()), dtype=torch.float32)
        return weights
