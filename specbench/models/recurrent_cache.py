"""Cache of recurrent and hybrid models: columns for their attention layers, and the state of all other layers.

A state cannot be cut to fewer tokens: `keep` keeps earlier ones, which `truncate` restores, and a forward is given
copies. B rows, b of them in a forward.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from specbench.cache.slots import SlotCache

NEVER = -1  # the length that a kept state has for a row that was given to another request
States = Mapping[str, Tensor]  # by name, a tensor [B, ...] of all rows, or [b, ...] of those of a forward


class Kept(NamedTuple):
    """A state of all rows."""

    read: list[int]  # by row, the number of tokens that it has read
    states: States  # [B, ...]; empty before the first forward


class RecurrentCache(SlotCache):
    """`columns` holds keys and values of attention layers. The model calls `before` and `after` around each forward,
    which changes the state of the rows alone that `reserve` was given."""

    fixed_shapes = False

    def __init__(self, columns: SlotCache):
        super().__init__(columns.rows, columns.capacity)
        self.columns = columns
        self.now = Kept([0] * columns.rows, {})
        self.kept: list[Kept] = []
        self.keeps_all = False  # whether the state after each forward is kept
        self.changes = [True] * columns.rows  # the rows whose state the next forwards change

    def __len__(self) -> int:
        return len(self.layers)

    # -- The state of each row ------------------------------------------------------------------

    def keep(self, every: bool) -> None:
        """Keeps the present state in place of all that were kept and, if `every`, the one after each forward too."""
        self.kept, self.keeps_all = [Kept(list(self.now.read), self.now.states)], every

    def point_before(self, row: int, length: int) -> int:
        return max((k.read[row] for k in (self.now, *self.kept) if k.read[row] <= length), default=0)

    @property
    def begins(self) -> bool:
        """Whether the rows that the next forward changes have read nothing."""
        return not self.now.states or not any(self.now.read[row] for row in self._rows() if self.changes[row])

    def before(self) -> States | None:
        """Copies of the state of the rows of the next forward [b, ...], which it may change; None if it `begins`."""
        if self.begins:
            return None
        return {name: state[self.span].clone() for name, state in self.now.states.items()}

    def after(self, states: States, tokens: int) -> None:
        """Takes over the state [b, ...] after a forward of so many tokens of each row."""
        rows, read = self._rows(), list(self.now.read)
        changed = [row for row in rows if self.changes[row]]
        for row in changed:
            read[row] += tokens
        if len(changed) < self.rows:
            found = _copies(self.now.states or _zeros(states, self.rows))
            _replace(found, changed, states, [row - rows.start for row in changed])
            states = found
        self.now = Kept(read, states)
        if self.keeps_all:
            others = [*self.kept[:-1], self.now]  # rows may be read one after the other: is each row in another one?
            if all(any(other.read[row] == n for other in others) for row, n in enumerate(self.kept[-1].read)):
                self.kept.pop()
            self.kept.append(self.now)

    def _rows(self) -> range:
        """The rows of the forward."""
        return range(self.span.start, self.span.stop)

    def _restore(self, lengths: Mapping[int, int]) -> None:
        """Has rows go back to what they were after lengths[row] tokens. Raises RuntimeError if that was not kept."""
        read, left = list(self.now.read), dict(lengths)
        found = _copies(self.now.states) if lengths else self.now.states
        for row, length in lengths.items():
            read[row] = length
        blank = Kept([0] * self.rows, _zeros(found, 1))
        for kept in (blank, *reversed(self.kept)):
            rows = [row for row, length in left.items() if kept.read[row] == length]
            if rows and found:
                _replace(found, rows, kept.states, [0] * len(rows) if kept is blank else rows)
            left = {row: length for row, length in left.items() if row not in rows}
        if left:
            raise RuntimeError(f"no state after so many tokens was kept, by row: {left}")
        self.now = Kept(read, found)

    def _forget(self, row: int) -> None:
        """The row has read nothing."""
        self._restore({row: 0} if self.now.read[row] else {})
        for kept in self.kept:
            kept.read[row] = NEVER

    # -- What all caches have -------------------------------------------------------------------

    def truncate(self, lengths: Sequence[int]) -> None:
        """Also restores the state that has read lengths[b] tokens in each row that has read more."""
        self.columns.truncate(lengths)
        shorter = {row: n for row, (n, read) in enumerate(zip(lengths, self.now.read, strict=True)) if n < read}
        if shorter:
            self._restore(shorter)

    def place(self, slots: Tensor, visible: int, row: int | None = None, in_blocks: bool = False) -> None:
        super().place(slots, visible, row, in_blocks)
        self.columns.place(slots, visible, row, in_blocks)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        return self.columns.update(key_states, value_states, layer_idx)

    def update_indexer(self, key_states: Tensor, layer_idx: int) -> Tensor:
        return self.columns.update_indexer(key_states, layer_idx)

    def reserve(self, lengths: Sequence[int]) -> None:
        """Also has the next forwards change these rows alone, and no state after them kept unless `keep` follows."""
        self.columns.reserve(lengths)
        self.changes, self.keeps_all = [length > 0 for length in lengths], False

    def may_admit(self, tokens: Sequence[int], columns: int) -> bool:
        return self.columns.may_admit(tokens, columns)

    def admit(self, row: int, tokens: Sequence[int], columns: int) -> int:
        self._forget(row)
        return self.columns.admit(row, tokens, columns)

    def release(self, row: int) -> None:
        self._forget(row)
        self.columns.release(row)

    def clear(self) -> None:
        self.now, self.kept, self.keeps_all = Kept([0] * self.rows, {}), [], False
        self.columns.clear()

    def bytes(self) -> int:
        held = {id(t): t for kept in (self.now, *self.kept) for t in kept.states.values()}
        return self.columns.bytes() + sum(t.nbytes for t in held.values())

    def column_bytes(self) -> float:
        return self.columns.column_bytes()

    def state_bytes(self) -> float:
        """Bytes of the state of one row, which every forward reads and writes as a whole."""
        return sum(state[:1].nbytes for state in self.now.states.values())

    def tensors(self) -> list[Tensor]:
        return [*self.columns.tensors(), *self.now.states.values()]


def _copies(states: States) -> dict[str, Tensor]:
    return {name: state.clone() for name, state in states.items()}


def _zeros(like: States, rows: int) -> dict[str, Tensor]:
    """A state of so many rows that has read nothing, with the shapes of `like` [b, ...]."""
    return {name: state.new_zeros(rows, *state.shape[1:]) for name, state in like.items()}


def _replace(states: States, rows: Sequence[int], others: States, places: Sequence[int]) -> None:
    """Gives `rows` of states [B, ...] the values of other states [b, ...] at `places`."""
    for name, state in states.items():
        state[list(rows)] = others[name][list(places)]
