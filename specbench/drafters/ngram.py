"""N-gram drafter (section 3.6): tables of the tokens of the prompt and the text so far, without model or training."""

from collections import defaultdict
from collections.abc import Sequence

from pydantic import Field

from specbench.decoding.state import State
from specbench.drafters.lookup_base import PointMassDrafter
from specbench.errors import ConfigError
from specbench.policies.base import GammaPolicy
from specbench.settings import BaseSettings


class NgramTable:
    """Counts, for each context in a text, the tokens that followed it. An n-gram of order k is a context of k - 1
    tokens and the token that followed it."""

    def __init__(self, min_order: int, max_order: int):
        self.orders = range(max_order, min_order - 1, -1)  # longest context first
        self.tokens: list[int] = []
        self.followers: dict[tuple[int, ...], dict[int, int]] = defaultdict(dict)

    def read(self, tokens: Sequence[int]) -> None:
        """Counts the tokens that are new since the last call, or all of a text that does not begin with what was
        counted: another request's, or one whose tokens were rejected inside `drafter=hierarchical`."""
        if self.tokens != tokens[: len(self.tokens)]:
            self.tokens.clear()
            self.followers.clear()
        for token in tokens[len(self.tokens) :]:
            for order in self.orders:
                if len(self.tokens) >= order - 1:
                    counts = self.followers[self._context(order)]
                    counts[token] = counts.pop(token, 0) + 1  # the most recent one moves to the end
            self.tokens.append(token)

    def _context(self, order: int) -> tuple[int, ...]:
        return tuple(self.tokens[len(self.tokens) - order + 1 :])

    def following(self, tokens: Sequence[int]) -> dict[int, int] | None:
        """How often each token followed the longest known context at the end of `tokens`; None if none is known."""
        for order in self.orders:
            if len(tokens) >= order - 1 and (counts := self.followers.get(tuple(tokens[len(tokens) - order + 1 :]))):
                return counts
        return None


class NgramDrafter(PointMassDrafter):
    """Guesses the most frequent continuation of the longest known context, chained on its own guesses (section 3.6); of
    equally frequent ones the most recent."""

    class Settings(BaseSettings):
        min_order: int = Field(ge=2, le=100)
        max_order: int = Field(ge=2, le=100)

        def check(self, prefix: str) -> None:
            if self.min_order > self.max_order:
                raise ConfigError(
                    f"{prefix}min_order={self.min_order} is not allowed: "
                    f"it must be at most {prefix}max_order={self.max_order}"
                )

    def __init__(self, min_order: int, max_order: int):
        self.orders = min_order, max_order

    def begin(self, state: State, stop: GammaPolicy | None = None) -> None:
        self.tables = [NgramTable(*self.orders) for _ in range(state.batch_size)]

    def guess(self, row: int, tokens: Sequence[int], gamma: int) -> list[int]:
        table, text = self.tables[row], list(tokens)
        table.read(tokens)
        while len(text) < len(tokens) + gamma and (counts := table.following(text)):
            text.append(max(reversed(counts), key=counts.__getitem__))  # the most recent of equally frequent ones
        return text[len(tokens) :]
