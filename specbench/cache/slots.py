"""What every cache backend shares: a token's keys and values live in the column of its position.

The model adapter says before each forward which columns the new tokens take (`place`); the
Hugging Face model then calls `update` layer by layer as with any other cache. Rollback is
`truncate`: what stands at and beyond a row's length is forgotten. A token tree takes consecutive
columns, and `commit` moves the accepted path to where a chain would have left it.
"""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import Cache


class SlotCache(Cache):
    """Keys and values [B, heads, columns, head size] per layer, columns indexed by position."""

    def __init__(self, batch_size: int, columns: int):
        super().__init__(layers=[])
        self.rows = batch_size
        self.capacity = columns
        self.slots: Tensor | None = None  # [B, N], columns of the tokens being forwarded
        self.starts: list[int] = [0] * batch_size
        self.visible = 0  # columns that attention reads

    def place(self, slots: Tensor, starts: Sequence[int]) -> None:
        """The next forward writes slots [B, N], where row b begins at host-known starts[b]."""
        self.slots, self.starts = slots, list(starts)
        self.visible = max(starts) + slots.shape[1]
        if self.visible > self.capacity:
            raise ValueError(f"the cache holds {self.capacity} columns, {self.visible} are needed")

    @abstractmethod
    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Stores [B, heads, N, head size] and returns every visible column."""

    @abstractmethod
    def truncate(self, lengths: Sequence[int]) -> None:
        """Forgets everything at and beyond lengths[b] in row b."""

    @abstractmethod
    def bytes(self) -> int:
        """Bytes that keys and values occupy now."""

    @abstractmethod
    def columns_of(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, as stored, for `commit`."""

    def commit(self, path: Tensor, base: Tensor) -> None:
        """Moves a tree's accepted path to consecutive columns.

        path [B, P] are node indices of the path in order, base [B] the column of node 0. A path
        shorter than P repeats any node; what lies beyond a row's length is forgotten anyway.
        """
        source = base[:, None] + path
        target = base[:, None] + torch.arange(path.shape[1], device=path.device)
        for layer in range(len(self)):
            for stored in self.columns_of(layer):
                shape = (-1, stored.shape[1], -1, stored.shape[3])
                moved = stored.gather(2, source[:, None, :, None].expand(shape))
                stored.scatter_(2, target[:, None, :, None].expand(shape), moved)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(self.starts)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return max(self.starts)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.visible, 0


def write_columns(stored: Tensor, slots: Tensor, new: Tensor) -> None:
    """Writes new [B, heads, N, head size] into stored [B, heads, T, head size] at slots [B, N]."""
    if stored.shape[0] == 1:
        stored.index_copy_(2, slots[0], new)
    else:
        stored.scatter_(2, slots[:, None, :, None].expand_as(new), new)
