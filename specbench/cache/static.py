"""Contiguous slots, allocated once: rollback writes nothing, stale columns are never visible."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from specbench.cache.slots import SlotCache, write_columns


class StaticCache(SlotCache):
    """All columns exist from the first forward on; each token overwrites its own."""

    @dataclass
    class Settings:
        pass

    def __init__(self, settings: Settings, batch_size: int, columns: int):
        super().__init__(batch_size, columns)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __len__(self) -> int:
        return len(self.keys)

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        if layer_idx == len(self.keys):  # head sizes are known only now
            for stored, new in ((self.keys, key_states), (self.values, value_states)):
                heads, size = new.shape[1], new.shape[3]
                stored.append(new.new_zeros(self.rows, heads, self.capacity, size))
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        write_columns(keys, self.slots, key_states)
        write_columns(values, self.slots, value_states)
        return keys[:, :, : self.visible], values[:, :, : self.visible]

    def truncate(self, lengths: Sequence[int]) -> None:
        self.starts = list(lengths)

    def bytes(self) -> int:
        return sum(t.nbytes for t in (*self.keys, *self.values))

    def columns_of(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.keys[layer], self.values[layer]
