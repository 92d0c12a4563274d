"""What drafters without a network share: they look at one row's tokens at a time, in plain Python."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specbench.decoding.draft import Draft
from specbench.decoding.noise import PROPOSAL
from specbench.decoding.rows import seen_tokens, window
from specbench.decoding.sampling import Sampling, draw
from specbench.decoding.state import State
from specbench.decoding.transfers import counts, move, upload
from specbench.drafters.base import Drafter
from specbench.errors import ConfigError
from specbench.settings import BaseSettings


def refuse_falling(settings: BaseSettings, prefix: str, low: str, high: str) -> None:
    """Raises ConfigError if the setting `low` is above the setting `high`."""
    values = vars(settings)
    if values[low] > values[high]:
        raise ConfigError(
            f"{prefix}{low}={values[low]} is not allowed: it must be at most {prefix}{high}={values[high]}"
        )


class PointMassDrafter(Drafter):
    """Drafts guesses without probabilities: q is a point mass on each."""

    @classmethod
    def point_masses(cls, settings: Any) -> bool:
        return True

    def propose(self, state: State, gamma: list[int]) -> Draft:
        guesses: list[list[int]] = []
        for row, most in enumerate(gamma):
            if not most:
                guesses.append([])
                continue
            text, given = state.at(row).tokens, state.at(row).encoder_input
            guesses.append(self.guess(row, [*given, *text] if given else text, most)[:most])
        width, device = max(map(len, guesses)), state.tokens.device
        if width == 0:
            return Draft.empty(state.batch_size, device)
        tokens = upload([[*row, *[0] * (width - len(row))] for row in guesses], device)
        return Draft.chain(tokens, None, counts(tuple(map(len, guesses)), device))

    @abstractmethod
    def guess(self, row: int, tokens: Sequence[int], gamma: int) -> list[int]:
        """At most gamma tokens that may follow this row's committed tokens, before which an encoder's input stands."""


class CountDrafter(Drafter):
    """Samples guesses from weights of all tokens; q is the distribution that they were drawn from."""

    def __init__(self, vocab_size: int, sampling: Sampling):
        self.vocab_size, self.sampling = vocab_size, sampling

    def propose(self, state: State, gamma: list[int]) -> Draft:
        if not any(gamma):
            return Draft.empty(state.batch_size, state.tokens.device)
        texts = [[] if sequence is None else list(sequence.tokens) for sequence in state.sequences]
        noise = window(state.noise[PROPOSAL], state.length, max(gamma)).cpu()  # on a GPU this waits for the device
        penalised = self.sampling.repetition_penalty != 1
        seen = seen_tokens(state.tokens, state.length, self.vocab_size).cpu() if penalised else None
        tokens: list[Tensor] = []
        qs: list[Tensor] = []
        anything = torch.ones(self.vocab_size)  # for rows that have no further guess
        for i in range(max(gamma)):
            weights = [self.weights(text) if i < g else anything for text, g in zip(texts, gamma, strict=True)]
            q = self.sampling.probabilities(torch.stack(weights).log(), seen)
            guess = draw(q, noise[:, i])
            if seen is not None:
                seen.scatter_(1, guess[:, None], True)
            for text, token in zip(texts, guess.tolist(), strict=True):
                text.append(token)
            tokens.append(guess)
            qs.append(q)
        device = state.tokens.device
        drawn_from = None if self.sampling.greedy else move(torch.stack(qs, 1), device)
        return Draft.chain(move(torch.stack(tokens, 1), device), drawn_from, counts(tuple(gamma), device))

    @abstractmethod
    def weights(self, tokens: Sequence[int]) -> Tensor:
        """Unnormalised weights [V], on the CPU, of the token that follows `tokens`."""
