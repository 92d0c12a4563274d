"""Hugging Face's own growing cache: columns are appended by concatenation, rollback crops them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from specbench.cache.slots import SlotCache, write_columns


class DynamicCache(SlotCache):
    """One `DynamicLayer` of transformers per layer. Rows that end in different columns are
    written in place, after the layer has grown to the longest of them."""

    @dataclass
    class Settings:
        pass

    def __init__(self, settings: Settings, batch_size: int, columns: int):
        super().__init__(batch_size, columns)

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        if layer_idx == len(self.layers):
            self.layers.append(DynamicLayer())
        layer = self.layers[layer_idx]
        present = layer.get_seq_length()
        if all(start == present for start in self.starts):
            return layer.update(key_states, value_states)
        missing = self.visible - present
        if missing > 0:
            shape = (*key_states.shape[:2], missing)
            layer.update(
                key_states.new_zeros(*shape, key_states.shape[3]),
                value_states.new_zeros(*shape, value_states.shape[3]),
            )
        write_columns(layer.keys, self.slots, key_states)
        write_columns(layer.values, self.slots, value_states)
        return layer.keys, layer.values

    def truncate(self, lengths: Sequence[int]) -> None:
        self.starts = list(lengths)
        for layer in self.layers:
            surplus = layer.get_seq_length() - max(lengths)
            if surplus > 0:
                layer.crop(-surplus)

    def bytes(self) -> int:
        return sum(t.nbytes for layer in self.layers for t in (layer.keys, layer.values) if isinstance(t, Tensor))

    def columns_of(self, layer: int) -> tuple[Tensor, Tensor]:
        stored = self.layers[layer]
        stored.keys, stored.values = torch.clone(stored.keys), torch.clone(stored.values)
        return stored.keys, stored.values
