"""What the cross-attention of an encoder-decoder reads: keys and values of the encoder's outputs, for each row.

They are written once, when a request gets its row, and never rolled back, so one store serves every backend of the
decoder's own cache. B rows, b of them in a forward, S tokens of the longest input.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Cache


class InputLayer:
    """Keys and values of one layer, [B, heads, S, head size] each. transformers reads `keys` and `values`."""

    def __init__(self, inputs: "EncoderInputs", keys: Tensor, values: Tensor):
        self.inputs, self.stored_keys, self.stored_values = inputs, keys, values

    @property
    def keys(self) -> Tensor:
        """[b, heads, visible, head size]."""
        return self.inputs.of_rows(self.stored_keys)

    @property
    def values(self) -> Tensor:
        """[b, heads, visible, head size]."""
        return self.inputs.of_rows(self.stored_values)


class EncoderInputs(Cache):
    """The inputs of `rows` rows. A row without one sees a single column, whose results nobody uses."""

    layers: list[Any]  # of InputLayer

    def __init__(self, rows: int, columns: Callable[[int], int], fixed_shapes: bool, device: torch.device):
        """`columns` rounds up a number of columns to store. With `fixed_shapes` all that are stored are read."""
        super().__init__(layers=[])
        self.rows, self.columns, self.fixed_shapes = rows, columns, fixed_shapes
        self.lengths = [1] * rows
        self.seen = torch.zeros(rows, 0, dtype=torch.bool, device=device)  # [B, S]
        self.span = slice(0, rows)  # the rows of the forward

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def visible(self) -> int:
        """The number of leading columns that a forward reads."""
        return self.seen.shape[1] if self.fixed_shapes else max(self.lengths)

    def clear(self) -> None:
        """Forgets the inputs of all rows; the tensors stay where they are."""
        for row in range(self.rows):
            self.release(row)

    def release(self, row: int) -> None:
        """Forgets the input of a row."""
        self.lengths[row] = 1
        self.seen[row] = False
        self.seen[row, :1] = True

    def write(self, row: int, layers: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Stores the keys and values [1, heads, s, head size] of every layer as the input of a row."""
        length = layers[0][0].shape[2]
        self._grow(length, layers)
        for layer, (keys, values) in zip(self.layers, layers, strict=True):
            layer.stored_keys[row, :, :length] = keys[0]
            layer.stored_values[row, :, :length] = values[0]
        self.lengths[row] = length
        self.seen[row] = False
        self.seen[row, :length] = True

    def _grow(self, length: int, layers: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Makes room for an input of this length."""
        missing = self.columns(length) - self.seen.shape[1]
        if not self.layers:
            empty = [[new.new_zeros(self.rows, new.shape[1], 0, new.shape[3]) for new in pair] for pair in layers]
            self.layers = [InputLayer(self, *pair) for pair in empty]
        if missing > 0:
            for layer in self.layers:
                layer.stored_keys = F.pad(layer.stored_keys, (0, 0, 0, missing))
                layer.stored_values = F.pad(layer.stored_values, (0, 0, 0, missing))
            self.seen = F.pad(self.seen, (0, missing))
            self.seen[:, 0] = True

    def place(self, count: int, row: int | None) -> Tensor:
        """Chooses the rows of the next forward: the first `count`, or only `row`. Returns the columns that each sees,
        [b, visible] bool."""
        self.span = slice(0, count) if row is None else slice(row, row + 1)
        return self.seen[self.span, : self.visible]

    def of_rows(self, stored: Tensor) -> Tensor:
        """The part [b, heads, visible, head size] of stored [B, heads, S, head size] that the forward reads."""
        return stored[self.span, :, : self.visible]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.visible

    def bytes(self) -> int:
        """Bytes that keys and values occupy now."""
        return sum(layer.stored_keys.nbytes + layer.stored_values.nbytes for layer in self.layers)

    def tensors(self) -> list[Tensor]:
        """Every tensor that a forward reads: keys and values [B, heads, S, head size] by layer, and what is seen [B,
        S]; empty before the first input."""
        pairs = [(layer.stored_keys, layer.stored_values) for layer in self.layers]
        return [t for pair in pairs for t in pair] + ([self.seen] if pairs else [])

    @contextmanager
    def bound(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Inside this context the inputs are these tensors, with the order and shapes of `tensors()`; a compiler traces
        with them."""
        own = self.tensors()
        self._hold(tensors)
        try:
            yield
        finally:
            self._hold(own)

    def _hold(self, tensors: Sequence[Tensor]) -> None:
        if tensors:
            *stored, self.seen = tensors
            for layer, keys, values in zip(self.layers, stored[::2], stored[1::2], strict=True):
                layer.stored_keys, layer.stored_values = keys, values
