"""Memory of each row for policies that learn from its rounds; it is lost when the row's request ends."""

from typing import TypeVar

from specbench.decoding.gamma_policy import RowsSeen

_Memory = TypeVar("_Memory")


class PerRow(dict[int, tuple[int | None, _Memory]]):
    """A value per row, which starts anew when another request takes the row."""

    def of(self, state: RowsSeen, row: int, fresh: _Memory) -> _Memory:
        """The row's value, or `fresh` if its request has none yet."""
        owner = state.serials.get(row)
        if row not in self or self[row][0] != owner:
            self[row] = (owner, fresh)
        return self[row][1]

    def change(self, row: int, value: _Memory) -> None:
        """Sets the value of the request that has the row."""
        self[row] = (self[row][0], value)
