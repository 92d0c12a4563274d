"""Cache of recurrent and hybrid models: columns for their attention layers, and the state of all other layers.

A state has read a number of tokens and cannot be cut to fewer. So the states from before a draft or a verification are
kept (`keep`), rollback restores the one that has read as many tokens as are left (`truncate`), and the model reads the
other tokens again. A forward never writes to a state that is kept: it is given copies. B rows, b of them in a forward.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specbench.cache.slots import SlotCache

States = Mapping[str, Tensor]  # by name, a tensor [B, ...] of all rows, or [b, ...] of those of a forward


class Kept(NamedTuple):
    """A state of all rows."""

    read: tuple[int, ...]  # by row, the number of tokens that it has read
    states: States  # [B, ...]; empty before the first forward


class RecurrentCache(SlotCache):
    """`columns` holds keys and values of attention layers, numbered in the order in which they appear.

    The model calls `before` and `after` around each forward. Only rows that `reserve` has been told of are changed: the
    others, which are idle or whose prompt is still being read, keep their state, whatever the forward computes for
    them.
    """

    fixed_shapes = False

    def __init__(self, columns: SlotCache, initial: Mapping[str, float] | None = None):
        """`initial` has the values of a state that has read nothing, by name; 0 unless given."""
        super().__init__(columns.rows, columns.capacity)
        self.columns, self.initial = columns, initial or {}
        self.numbers: dict[int, int] = {}  # of the attention layers, by their index in the model
        self.now = Kept((0,) * columns.rows, {})
        self.kept: list[Kept] = []
        self.keeps_all = False  # whether the state after each forward is kept
        self.changes = [True] * columns.rows  # the rows whose state the next forwards change

    def __len__(self) -> int:
        return len(self.layers)

    # -- The state of each row ------------------------------------------------------------------

    def keep(self, every: bool) -> None:
        """Keeps the present state in place of all that were kept and, if `every`, the one after each forward too."""
        self.kept, self.keeps_all = [self.now], every

    def point_before(self, row: int, length: int) -> int:
        return max((k.read[row] for k in (self.now, *self.kept) if k.read[row] <= length), default=0)

    @property
    def begins(self) -> bool:
        """Whether the rows that the next forward changes have read nothing."""
        return not self.now.states or not any(self.now.read[r] for r in self._rows_of_forward() if self.changes[r])

    def before(self) -> States | None:
        """Copies of the state of the rows of the next forward [b, ...], which it may change; None if it `begins`."""
        if self.begins:
            return None
        rows = self._rows_of_forward()
        return {name: state[rows.start : rows.stop].clone() for name, state in self.now.states.items()}

    def after(self, states: States, tokens: int) -> None:
        """Takes over the state [b, ...] after a forward of so many tokens of each row."""
        rows = self._rows_of_forward()
        changed = [row for row in rows if self.changes[row]]
        read = tuple(n + tokens * (row in changed) for row, n in enumerate(self.now.read))
        if len(changed) < self.rows:
            states = self._replaced(self._all_rows(states), changed, states, [row - rows.start for row in changed])
        self.now = Kept(read, states)
        if self.keeps_all:
            self.kept.append(self.now)

    def _rows_of_forward(self) -> range:
        return range(len(self.slots)) if self.row is None else range(self.row, self.row + 1)

    def _all_rows(self, like: States) -> States:
        """The present state [B, ...]; before the first forward, one that has read nothing, with the shapes of `like`
        [b, ...]."""
        return self.now.states or {
            name: state.new_full((self.rows, *state.shape[1:]), self.initial.get(name, 0))
            for name, state in like.items()
        }

    @staticmethod
    def _replaced(states: States, rows: Sequence[int], others: States, places: Sequence[int]) -> States:
        """Copies of states [B, ...] in which `rows` have the values of other states at `places`."""
        found = {name: state.clone() for name, state in states.items()}
        for name, state in found.items():
            state[list(rows)] = others[name][list(places)]
        return found

    def _forget(self, row: int) -> None:
        """The row has read nothing."""
        self.now = self._with_row(self.now, row, 0)
        self.kept = [self._without(kept, row) for kept in self.kept]

    @staticmethod
    def _without(kept: Kept, row: int) -> Kept:
        return kept._replace(read=(*kept.read[:row], -1, *kept.read[row + 1 :]))

    def _with_row(self, now: Kept, row: int, length: int) -> Kept:
        """The state `now` in which the row has read `length` tokens. Raises RuntimeError if no such state was kept."""
        if now.read[row] == length:
            return now
        read = (*now.read[:row], length, *now.read[row + 1 :])
        if not now.states or (length == 0 and self.rows == 1):
            return Kept(read, {})
        if length == 0:
            nothing = {
                name: torch.full_like(state[:1], self.initial.get(name, 0)) for name, state in now.states.items()
            }
            return Kept(read, self._replaced(now.states, [row], nothing, [0]))
        found = next((kept for kept in reversed(self.kept) if kept.read[row] == length), None)
        if found is None:
            raise RuntimeError(f"no state of row {row} after {length} tokens was kept")
        return Kept(read, found.states if self.rows == 1 else self._replaced(now.states, [row], found.states, [row]))

    # -- What all caches have -------------------------------------------------------------------

    def truncate(self, lengths: Sequence[int]) -> None:
        """Also restores the state that has read lengths[b] tokens in each row that has read more."""
        self.columns.truncate(lengths)
        for row, length in enumerate(lengths):
            self.now = self._with_row(self.now, row, min(length, self.now.read[row]))

    def place(self, slots: Tensor, visible: int, row: int | None = None, in_blocks: bool = False) -> None:
        super().place(slots, visible, row, in_blocks)
        self.columns.place(slots, visible, row, in_blocks)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        return self.columns.update(key_states, value_states, self.numbers.setdefault(layer_idx, len(self.numbers)))

    def stored(self, layer_idx: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return self.columns.stored(layer_idx, keys, values)

    def reserve(self, lengths: Sequence[int]) -> None:
        self.columns.reserve(lengths)
        self.changes = [length > 0 for length in lengths]

    def may_admit(self, tokens: Sequence[int], columns: int) -> bool:
        return self.columns.may_admit(tokens[:1], columns)

    def admit(self, row: int, tokens: Sequence[int], columns: int) -> int:
        """As for all caches; prompts are never shared, because the state behind a shared beginning is not kept."""
        self._forget(row)
        return self.columns.admit(row, tokens[:1], columns)

    def release(self, row: int) -> None:
        self._forget(row)
        self.columns.release(row)

    def clear(self) -> None:
        self.now, self.kept, self.keeps_all = Kept((0,) * self.rows, {}), [], False
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

    def hold(self, tensors: Sequence[Tensor]) -> None:
        own = len(self.columns.tensors())
        self.columns.hold(tensors[:own])
        self.now = self.now._replace(states=dict(zip(self.now.states, tensors[own:], strict=True)))

    def commit(self, path: Tensor, base: Tensor) -> None:
        """Raises RuntimeError: the branches of a tree would need a state each."""
        raise RuntimeError("a recurrent state cannot follow the branches of a tree")
