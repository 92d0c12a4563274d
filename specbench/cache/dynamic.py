"""Hugging Face's own growing cache: columns are appended by concatenation, rollback crops them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from specbench.cache.slots import SlotCache, move_columns, write_columns


class DynamicCache(SlotCache):
    """One `DynamicLayer` of transformers per layer, always as long as its longest row."""

    fixed_shapes = False

    @dataclass
    class Settings:
        pass

    def __init__(self, settings: Settings, rows: int, columns: int):
        super().__init__(rows, columns)

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        if layer_idx == len(self.layers):
            self.layers.append(DynamicLayer())
        layer = self.layers[layer_idx]
        missing = self.visible - layer.get_seq_length()
        if missing > 0:
            layer.update(*(new.new_zeros(self.rows, new.shape[1], missing, new.shape[3])
                           for new in (key_states, value_states)))  # fmt: skip
        found = []
        for stored, new in ((layer.keys, key_states), (layer.values, value_states)):
            stored = stored if self.row is None else stored[self.row : self.row + 1]
            write_columns(stored, self.slots, new)
            found.append(stored[:, :, : self.visible])
        return tuple(found)

    def truncate(self, lengths: Sequence[int]) -> None:
        for layer in self.layers:
            surplus = layer.get_seq_length() - max(lengths)
            if surplus > 0:
                layer.crop(-surplus)

    def bytes(self) -> int:
        return sum(t.nbytes for t in self.tensors())

    def tensors(self) -> list[Tensor]:
        return [t for layer in self.layers for t in (layer.keys, layer.values)]

    def hold(self, tensors: Sequence[Tensor]) -> None:
        for index, layer in enumerate(self.layers):
            layer.keys, layer.values = tensors[2 * index : 2 * index + 2]

    def commit(self, path: Tensor, base: Tensor) -> None:
        self.hold([torch.clone(t) for t in self.tensors()])  # a crop is a view of what was longer
        for stored in self.tensors():
            move_columns(stored, path, base)
