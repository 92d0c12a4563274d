"""What the cross-attention of an encoder-decoder reads: keys and values of the encoder's outputs, for each row.

They are written once, when a request gets its row, and never rolled back, so one store serves every backend of the
decoder's own cache. B rows, b of them in a forward, S tokens of the longest input.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Cache


class InputLayer:
    """One layer, of which transformers reads `keys` and `values` [b, heads, visible, head size]."""

    def __init__(self, inputs: "EncoderInputs", number: int):
        self.inputs, self.number = inputs, number

    @property
    def keys(self) -> Tensor:
        return self.inputs.of_rows(self.inputs.stored[2 * self.number])

    @property
    def values(self) -> Tensor:
        return self.inputs.of_rows(self.inputs.stored[2 * self.number + 1])


class EncoderInputs(Cache):
    """The inputs of `rows` rows. A row without one sees a single column, whose results nobody uses."""

    def __init__(self, rows: int, columns: Callable[[int], int], fixed_shapes: bool, device: torch.device):
        """`columns` rounds up a number of columns to store. With `fixed_shapes` all that are stored are read."""
        super().__init__(layers=[])
        self.rows, self.columns, self.fixed_shapes = rows, columns, fixed_shapes
        self.lengths = [1] * rows
        self.stored: list[Tensor] = []  # keys and values of each layer in turn, [B, heads, S, head size]
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
        self._set_length(row, 1)

    def write(self, row: int, layers: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Stores the keys and values [1, heads, s, head size] of every layer as the input of a row."""
        given = [new for pair in layers for new in pair]
        if not self.stored:
            self.stored = [new.new_zeros(self.rows, new.shape[1], 0, new.shape[3]) for new in given]
            layer_list: list[Any] = [InputLayer(self, number) for number in range(len(layers))]
            self.layers = layer_list
        length = given[0].shape[2]
        missing = self.columns(length) - self.seen.shape[1]
        if missing > 0:
            self.stored = [F.pad(stored, (0, 0, 0, missing)) for stored in self.stored]
            self.seen = F.pad(self.seen, (0, missing))
            self.seen[:, 0] = True
        for stored, new in zip(self.stored, given, strict=True):
            stored[row, :, :length] = new[0]
        self._set_length(row, length)

    def _set_length(self, row: int, length: int) -> None:
        self.lengths[row] = length
        self.seen[row] = False
        self.seen[row, :length] = True

    def place(self, count: int, row: int | None) -> Tensor:
        """Chooses a forward's rows: the first `count`, or only `row`. Returns the columns they see [b, visible]."""
        self.span = slice(0, count) if row is None else slice(row, row + 1)
        return self.seen[self.span, : self.visible]

    def of_rows(self, stored: Tensor) -> Tensor:
        """The part [b, heads, visible, head size] of stored [B, heads, S, head size] that the forward reads."""
        return stored[self.span, :, : self.visible]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.visible

    def bytes(self) -> int:
        """Bytes that keys and values occupy now."""
        return sum(stored.nbytes for stored in self.stored)

    def tensors(self) -> list[Tensor]:
        """Keys and values [B, heads, S, head size] by layer, and what is seen [B, S]; empty before the first input."""
        return [*self.stored, self.seen] if self.stored else []
