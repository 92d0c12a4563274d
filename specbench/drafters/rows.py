"""What drafters without a network share: they look at one row's tokens at a time, in plain Python."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from specbench.context import Context
from specbench.decoding.noise import PROPOSAL
from specbench.decoding.sampling import draw
from specbench.decoding.state import Draft, State
from specbench.measure.timers import Stopwatch


class PointMassDrafter(ABC):
    """Guesses tokens outright: q is a point mass on each."""

    context = 2**63 - 1  # no limit of their own
    operations_per_token = 0

    def begin(self, state: State, clock: Stopwatch) -> None:
        """Nothing is remembered between prompts unless a subclass says so."""

    def propose(self, state: State, gamma: list[int]) -> Draft:
        rows = state.tokens.tolist()
        guesses = [
            self.guess(row, rows[row][:length], wanted) if wanted else []
            for row, (length, wanted) in enumerate(zip(state.lengths, gamma, strict=True))
        ]
        return to_draft(guesses, None, state)

    @abstractmethod
    def guess(self, row: int, tokens: Sequence[int], gamma: int) -> list[int]:
        """At most gamma tokens that may follow this row's committed tokens."""


class CountDrafter(ABC):
    """Samples guesses from a table of weights, with the real q."""

    context = 2**63 - 1
    operations_per_token = 0

    def __init__(self, context: Context):
        self.sampling = context.sampling
        self.vocab_size = context.target.vocab_size

    def begin(self, state: State, clock: Stopwatch) -> None:
        """Nothing is remembered between prompts unless a subclass says so."""

    def propose(self, state: State, gamma: list[int]) -> Draft:
        rows, guesses, q = state.tokens.tolist(), [], []
        noise = state.window(state.noise[PROPOSAL], 0, max(gamma)).cpu()
        seen = state.seen(self.vocab_size).cpu() if self.sampling.repetition_penalty != 1 else None
        for row, (length, wanted) in enumerate(zip(state.lengths, gamma, strict=True)):
            tokens, laws = list(rows[row][:length]), []
            for i in range(wanted):
                weights = self.weights(row, tokens)
                if weights is None:
                    break
                law = self.sampling.probabilities(weights.log(), None if seen is None else seen[row])
                token = int(draw(law, noise[row, i]))
                if seen is not None:
                    seen[row, token] = True
                tokens.append(token)
                laws.append(law)
            guesses.append(tokens[length:])
            q.append(laws)
        return to_draft(guesses, None if self.sampling.greedy else q, state)

    @abstractmethod
    def weights(self, row: int, tokens: Sequence[int]) -> Tensor | None:
        """Unnormalised weights [V] of what follows `tokens`, on the CPU; None is no guess."""


def to_draft(guesses: list[list[int]], q: list[list[Tensor]] | None, state: State) -> Draft:
    """Ragged guesses per row, and their q if it is not a point mass, as one draft."""
    width = max(map(len, guesses))
    device = state.tokens.device
    if width == 0:
        return Draft.empty(state.batch_size, device)
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in guesses])
    count = torch.tensor([len(row) for row in guesses])
    probs = None
    if q is not None:
        vocab_size = next(law.shape[-1] for laws in q for law in laws)
        probs = torch.zeros(len(guesses), width, vocab_size)
        for row, laws in enumerate(q):
            for i, law in enumerate(laws):
                probs[row, i] = law
        probs = probs.to(device)
    return Draft.chain(tokens.to(device), probs, count.to(device))
