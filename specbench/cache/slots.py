"""Base class of cache backends, and the static one: a token's keys and values are stored in the column of its position.

The model adapter says before each forward which columns the new tokens take (`place`); the Hugging Face model then
calls `update` layer by layer as with any other cache. Rollback is `truncate`: everything at and beyond a row's length
is forgotten. A token tree takes consecutive columns, and `commit` moves the accepted path to the columns that a chain
would have taken. B rows, b of them in a forward, N new tokens, T columns.
"""

import inspect
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import Cache

from specbench.decoding.transfers import constant
from specbench.settings import Component


def cache_argument(forward: Callable[..., Any]) -> str:
    """What a forward of transformers calls its cache: `cache` from 5.24 on; before, `past_key_values` or, if it keeps
    nothing but states, `cache_params`. Code that came with a checkpoint may use an older name than transformers."""
    names = inspect.signature(forward).parameters
    return next((name for name in ("cache", "cache_params") if name in names), "past_key_values")


class SlotCache(Component, Cache):
    """Keys and values of `rows` rows, `capacity` columns each; a column is a position."""

    fixed_shapes: ClassVar[bool] = True  # whether its tensors keep their shapes, which compiled code needs
    shares: ClassVar[bool] = False  # whether prompts that begin alike are read once

    def __init__(self, rows: int, columns: int):
        Cache.__init__(self, layers=[])  # a subclass may have other caches of transformers as bases
        self.rows, self.capacity = rows, columns
        self.slots = torch.empty(0)  # [b, N], columns of the tokens being forwarded
        self.visible = 0  # columns that attention reads
        self.device = torch.device("cpu")  # of the tokens being forwarded
        self.span = slice(0, 0)  # the rows of the forward
        self.pools: list[Tensor] = []  # keys and values of each layer in turn, in the backend's own shapes
        self.numbers: dict[Any, int] = {}  # of the parts of the model that store something
        self.contiguous = False  # whether the model's attention needs the visible columns in one piece

    @classmethod
    def columns_in_all(cls, settings: Any, rows: int, columns: int) -> int:
        """The number of columns that such a cache has memory for, all rows together."""
        return rows * columns

    def __len__(self) -> int:
        return len(self.pools) // 2

    # -- A forward ------------------------------------------------------------------------------

    def place(self, slots: Tensor, visible: int, row: int | None = None) -> None:
        """Sets the columns slots [b, N] that the next forward writes, and the number `visible` of leading columns that
        it sees; `row` is the only row of the forward, None for the first b. Raises ValueError if they are too many."""
        if not torch.compiler.is_compiling() and visible > self.capacity:
            raise ValueError(f"the cache holds {self.capacity} columns, {visible} are needed")
        self.slots = slots
        self.choose(slots, visible, row)

    def choose(self, tokens: Tensor, visible: int, row: int | None = None) -> None:
        """As `place`, for a forward of tokens [b, N] that finds their columns itself, in `stored_blocks`."""
        self.visible, self.device = visible, tokens.device
        self.span = slice(0, len(tokens)) if row is None else slice(row, row + 1)

    def stored_blocks(self, layer_idx: int, new: Tensor) -> tuple[Tensor, Tensor]:
        """A layer's keys and values where they are stored, [blocks, heads, block size, head size], for kernels that go
        through `block_table`; made for new ones like new [b, heads, n, head size]."""
        keys, values = self.stored(self._number(layer_idx), new, new)
        return self.blocks_of(keys), self.blocks_of(values)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores new keys and values [b, heads, N, head size]; returns all visible [b, heads, visible, head size]."""
        keys, values = self.stored(self._number(layer_idx), key_states, value_states)
        self.write(keys, key_states)
        self.write(values, value_states)
        return self.read(keys), self.read(values)

    def update_indexer(self, key_states: Tensor, layer_idx: int) -> Tensor:
        """Stores the new keys [b, N, head size] with which a layer of sparse attention chooses its columns (DeepSeek's
        indexer); returns all visible ones [b, visible, head size]."""
        new = key_states[:, None]  # of one head, and without values
        keys, _ = self.stored(self._number(("indexer", layer_idx)), new, new[..., :0])
        self.write(keys, new)
        return self.read(keys)[:, 0]

    def _number(self, part: Any) -> int:
        """Where the tensors of a part of the model are stored: parts are numbered in the order of their first calls."""
        return self.numbers.setdefault(part, len(self.numbers))

    def stored(self, layer_idx: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """A layer's tensors, made for new keys and values [b, heads, n, head size], whose sizes are known only then."""
        if 2 * layer_idx == len(self.pools):
            self.pools += [self.empty(new) for new in (keys, values)]
        return self.pools[2 * layer_idx], self.pools[2 * layer_idx + 1]

    def empty(self, new: Tensor) -> Tensor:
        """A layer's keys or values for all rows, with heads, head size and dtype of new [b, heads, n, head size]."""
        return new.new_zeros(self.rows, new.shape[1], self.capacity, new.shape[3])

    def tensors(self) -> list[Tensor]:
        """Every tensor that a forward reads or writes, in a fixed order, in the backend's own shapes."""
        return list(self.pools)

    def use(self, tensors: Sequence[Tensor]) -> None:
        """Uses these tensors, with the order and shapes of `tensors()`, in place of the present ones."""
        self.pools = list(tensors)

    def write(self, stored: Tensor, new: Tensor) -> None:
        """Writes new [b, heads, N, head size] into stored [B, heads, T, head size] at the placed columns."""
        own, slots = stored[self.span], self.slots
        if own.shape[0] == 1:
            own.index_copy_(2, slots[0], new)
        else:
            rows, heads = (torch.arange(n, device=slots.device) for n in own.shape[:2])
            own[rows[:, None, None], heads[None, :, None], slots[:, None, :]] = new

    def read(self, stored: Tensor) -> Tensor:
        """The visible columns [b, heads, visible, head size] of stored [B, heads, T, head size]."""
        return stored[self.span, :, : self.visible]

    def blocks_of(self, stored: Tensor) -> Tensor:
        """A view [blocks, heads, block size, head size] of stored [B, heads, T, head size]: a block for each row."""
        return stored

    def block_table(self) -> Tensor:
        """[b, width]: for each row of the forward, the numbers of the blocks that hold its columns, in order."""
        return constant(torch.arange)(self.span.start, self.span.stop, device=self.device)[:, None]

    def commit(self, path: Tensor, base: Tensor) -> None:
        """Moves the accepted path of a tree to consecutive columns: path [B, P] holds its node indices in order, base
        [B] the column of node 0. A shorter path repeats any node: columns beyond a row's length are forgotten."""
        source = base[:, None] + path
        target = base[:, None] + torch.arange(path.shape[1], device=path.device)
        for stored in self.tensors():
            shape = (-1, stored.shape[1], -1, stored.shape[3])
            moved = stored.gather(2, source[:, None, :, None].expand(shape))
            stored.scatter_(2, target[:, None, :, None].expand(shape), moved)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.visible - self.slots.shape[1]

    get_query_offset = get_seq_length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.visible, 0

    # -- Rows -----------------------------------------------------------------------------------

    @abstractmethod
    def truncate(self, lengths: Sequence[int]) -> None:
        """Forgets everything at and beyond column lengths[b] in row b."""

    def reserve(self, lengths: Sequence[int]) -> None:
        """Makes sure that columns up to lengths[b] - 1 of row b can be written; 0 leaves a row out."""

    def may_admit(self, tokens: Sequence[int], columns: int) -> bool:
        """Whether a request with this prompt, which needs at most `columns` columns, fits beside the others."""
        return True

    def admit(self, row: int, tokens: Sequence[int], columns: int) -> int:
        """Gives a row to a new request; returns how many of its leading tokens are in the cache already."""
        return 0

    def written(self, row: int, tokens: Sequence[int]) -> None:
        """Called when these leading tokens of the row have been read completely: other rows may share them."""

    def release(self, row: int) -> None:
        """Frees a row: its request has ended."""

    def clear(self) -> None:
        """Frees all rows, and forgets their content."""
        for row in range(self.rows):
            self.release(row)

    def bytes(self) -> int:
        """Bytes that keys and values occupy now."""
        return sum(t.nbytes for t in self.tensors())

    def column_bytes(self) -> float:
        """Bytes of one column of one row, all layers."""
        return sum(t[:1, :, :1].nbytes for t in self.tensors())


class StaticCache(SlotCache):
    """Allocates all columns in the first forward; each token overwrites the column of its position."""

    def truncate(self, lengths: Sequence[int]) -> None:
        """Does nothing: columns beyond a row's length are overwritten before they can be seen."""
