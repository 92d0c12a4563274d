"""Contiguous columns, allocated once: rollback writes nothing, because stale columns are never visible."""

from collections.abc import Sequence
from itertools import takewhile

from specbench.cache.slots import SlotCache


class StaticCache(SlotCache):
    """Allocates all columns in the first forward; each token overwrites the column of its position."""

    in_place = True

    def __init__(self, rows: int, columns: int):
        super().__init__(rows, columns)
        self._prompt: list[int] = []  # tokens whose columns the only row still holds; of several rows nothing is known
        self._reopened = False

    def admit(self, row: int, tokens: Sequence[int], columns: int) -> int:
        known = self._prompt if self._reopened else []
        pairs = zip(known, tokens[:-1], strict=False)
        self._prompt = [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
        return len(self._prompt)

    def written(self, row: int, tokens: Sequence[int]) -> None:
        if self.rows == 1:  # of several, the idle ones are written to
            self._prompt = list(tokens)[:-1]

    def reopen(self) -> None:
        self._reopened = True

    def clear(self) -> None:
        super().clear()
        self._prompt, self._reopened = [], False

    def truncate(self, lengths: Sequence[int]) -> None:
        """Does nothing: columns beyond a row's length are overwritten before they can be seen."""
