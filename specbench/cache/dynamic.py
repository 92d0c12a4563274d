"""Hugging Face's own growing cache: columns are appended by concatenation, rollback crops them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from specbench.cache.slots import SlotCache


class DynamicCache(SlotCache):
    """One transformers `DynamicLayer` per layer, each always as long as its longest row."""

    fixed_shapes = False
    layers: list[Any]

    def __len__(self) -> int:
        return len(self.layers)

    def stored(self, layer_idx: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if layer_idx == len(self.layers):
            self.layers.append(DynamicLayer())
        layer = self.layers[layer_idx]
        missing = self.visible - layer.get_seq_length()
        if missing > 0:
            layer.update(*(new.new_zeros(self.rows, new.shape[1], missing, new.shape[3]) for new in (keys, values)))
        return layer.keys, layer.values

    def truncate(self, lengths: Sequence[int]) -> None:
        for layer in self.layers:
            surplus = layer.get_seq_length() - max(lengths)
            if surplus > 0:
                layer.crop(-surplus)

    def tensors(self) -> list[Tensor]:
        return [t for layer in self.layers for t in (layer.keys, layer.values)]

    def use(self, tensors: Sequence[Tensor]) -> None:
        for index, layer in enumerate(self.layers):
            layer.keys, layer.values = tensors[2 * index : 2 * index + 2]

    def commit(self, path: Tensor, base: Tensor) -> None:
        self.use([torch.clone(t) for t in self.tensors()])  # a cropped tensor is a view of a longer one
        super().commit(path, base)
