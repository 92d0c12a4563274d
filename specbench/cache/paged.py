"""Paged cache: rows are given blocks of columns as they grow, and a block table maps rows to blocks.

A block belongs to the rows that refer to it. Full blocks of a prompt are shared by every row whose prompt begins with
the same tokens, and keep their content until a row needs the memory. A row's rollback frees its blocks at and beyond
ceil(length / block_size); the partly filled one is kept. B rows, N new tokens.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import torch
from pydantic import Field
from torch import Tensor

from specbench.cache.slots import SlotCache
from specbench.decoding.transfers import move, upload
from specbench.settings import BaseSettings

NOBODY = 0  # the block that idle rows write to


class Blocks:
    """Bookkeeping of blocks: how many rows refer to each, which are free, and which prompts they hold."""

    def __init__(self, count: int):
        self.count = count
        self.holders = [0] * (count + 1)  # references to each block; block 0 has none
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, count + 1))  # oldest first
        self.by_prefix: dict[bytes, int] = {}  # digest of all tokens up to a full block's end -> block
        self.prefix_of: dict[int, bytes] = {}

    def take(self) -> int:
        """Takes a free block; its old content can no longer be found. Raises RuntimeError if none is free."""
        if not self.free:
            raise RuntimeError(f"all {self.count} cache blocks are in use")
        block, _ = self.free.popitem(last=False)
        self.forget(block)
        self.holders[block] = 1
        return block

    def share(self, block: int) -> int:
        """Adds a reference to a block that is in use, or free with its content still there; returns the block."""
        self.free.pop(block, None)
        self.holders[block] += 1
        return block

    def drop(self, block: int) -> None:
        """Removes a reference; the last one frees the block. Raises RuntimeError if nothing refers to it."""
        if self.holders[block] <= 0:
            raise RuntimeError(f"cache block {block} was freed twice")
        self.holders[block] -= 1
        if self.holders[block] == 0:
            self.free[block] = None

    def forget(self, block: int) -> None:
        """Removes the block's content from the prompts that `by_prefix` finds."""
        self.by_prefix.pop(self.prefix_of.pop(block, b""), None)

    def publish(self, block: int, prefix: bytes) -> None:
        """Lets `by_prefix` find a full block; `prefix` is the digest of all tokens up to its end."""
        if prefix not in self.by_prefix and block not in self.prefix_of:
            self.by_prefix[prefix] = block
            self.prefix_of[block] = prefix


def full_blocks(tokens: Sequence[int], size: int) -> Iterator[bytes]:
    """The digest of the prompt up to the end of each full block, without the last token, which is never cached."""
    digest = hashlib.sha256()
    for begin in range(0, len(tokens) - size, size):
        digest.update(array("q", tokens[begin : begin + size]).tobytes())
        yield digest.digest()


class PagedCache(SlotCache):
    """Keys and values in a pool [(blocks + 1) * block_size, heads, head size] per layer. A module's attention reads a
    copy of the visible columns; kernels read the pool itself, through the block table."""

    shares = True

    class Settings(BaseSettings):
        block_size: int = Field(ge=1, le=2**16)
        blocks: int | None = Field(ge=1, le=2**31)

    def __init__(self, rows: int, columns: int, block_size: int, blocks: int | None = None):
        super().__init__(rows, columns)
        self.block_size = block_size
        self.width = -(-columns // block_size)  # the largest number of blocks of a row
        self.blocks = Blocks(blocks or rows * self.width)
        self.held: list[list[int]] = [[] for _ in range(rows)]
        self.promised = [0] * rows  # the most blocks that each admitted row will hold
        self.table = torch.full((rows, self.width), NOBODY)

    @classmethod
    def from_settings(cls, settings: Settings, rows: int, columns: int) -> "PagedCache":
        return cls(rows, columns, settings.block_size, settings.blocks)

    @classmethod
    def columns_in_all(cls, settings: Settings, rows: int, columns: int) -> int:
        return ((settings.blocks or rows * -(-columns // settings.block_size)) + 1) * settings.block_size

    # -- Accounting, on the host ----------------------------------------------------------------

    def may_admit(self, tokens: Sequence[int], columns: int) -> bool:
        return sum(self.promised) + self._blocks_for(columns) <= self.blocks.count

    def admit(self, row: int, tokens: Sequence[int], columns: int) -> int:
        self.release(row)
        self.promised[row] = min(self._blocks_for(columns), self.width)
        for prefix in full_blocks(tokens, self.block_size):
            block = self.blocks.by_prefix.get(prefix)
            if block is None:
                break
            self.held[row].append(self.blocks.share(block))
        self._write_table(row)
        return len(self.held[row]) * self.block_size

    def written(self, row: int, tokens: Sequence[int]) -> None:
        for block, prefix in zip(self.held[row], full_blocks(tokens, self.block_size), strict=False):
            self.blocks.publish(block, prefix)

    def release(self, row: int) -> None:
        self._cut(row, 0)
        self.promised[row] = 0

    def clear(self) -> None:
        super().clear()
        for block in list(self.blocks.prefix_of):
            self.blocks.forget(block)

    def truncate(self, lengths: Sequence[int]) -> None:
        for row, length in enumerate(lengths):
            self._cut(row, self._blocks_for(length))
            if length % self.block_size and len(self.held[row]) == self._blocks_for(length):
                self._own_last(row)

    def _own_last(self, row: int) -> None:
        """Gives the row a copy of its partly filled last block, which will be written to, if other rows share it."""
        block = self.held[row][-1]
        if self.blocks.holders[block] == 1:
            self.blocks.forget(block)
            return
        own = self.held[row][-1] = self.blocks.take()
        for pool in self.pools:
            blocks = pool.view(-1, self.block_size, *pool.shape[1:])
            blocks[own] = blocks[block]
        self.blocks.drop(block)
        self._write_table(row)

    def reserve(self, lengths: Sequence[int]) -> None:
        for row, length in enumerate(lengths):
            wanted = min(self._blocks_for(length), self.promised[row] or self.width)
            if len(self.held[row]) < wanted:
                while len(self.held[row]) < wanted:
                    self.held[row].append(self.blocks.take())
                self._write_table(row)

    def _blocks_for(self, columns: int) -> int:
        return -(-columns // self.block_size)

    def _cut(self, row: int, keep: int) -> None:
        """Drops the row's blocks after the first `keep`."""
        if len(self.held[row]) > keep:
            while len(self.held[row]) > keep:
                self.blocks.drop(self.held[row].pop())
            self._write_table(row)

    def _write_table(self, row: int) -> None:
        blocks = self.held[row]
        self.table[row] = upload(blocks + [NOBODY] * (self.width - len(blocks)), self.table.device)

    # -- Keys and values ------------------------------------------------------------------------

    def place(self, slots: Tensor, visible: int, row: int | None = None) -> None:
        super().place(slots, visible, row)
        table = self.block_table()
        self.targets = self._where(table, slots)  # [b, N], indices into the pool
        columns = torch.arange(visible, device=slots.device).expand(len(table), -1)
        self.columns = self._where(table, columns)  # [b, visible], indices into the pool

    def choose(self, tokens: Tensor, visible: int, row: int | None = None) -> None:
        super().choose(tokens, visible, row)
        if self.table.device != self.device:
            self.table = move(self.table, self.device)

    def block_table(self) -> Tensor:
        return self.table[self.span]

    def blocks_of(self, stored: Tensor) -> Tensor:
        """A view [blocks, heads, block size, head size] of stored [(blocks + 1) * block size, heads, head size]."""
        return stored.view(-1, self.block_size, *stored.shape[1:]).transpose(1, 2)

    def _where(self, table: Tensor, columns: Tensor) -> Tensor:
        """Indices [b, n] into a pool, of columns [b, n] of the rows with block table [b, width]."""
        block = table.gather(1, (columns // self.block_size).clamp(max=self.width - 1))
        return block * self.block_size + columns % self.block_size

    def empty(self, new: Tensor) -> Tensor:
        return new.new_zeros((self.blocks.count + 1) * self.block_size, new.shape[1], new.shape[3])

    def write(self, stored: Tensor, new: Tensor) -> None:
        stored.index_copy_(0, self.targets.flatten(), new.transpose(1, 2).flatten(0, 1))

    def read(self, stored: Tensor) -> Tensor:
        found = stored[self.columns].transpose(1, 2)  # [b, heads, visible, head size]
        return found.contiguous() if self.contiguous else found

    def column_bytes(self) -> float:
        return sum(pool[:1].nbytes for pool in self.pools)

    def tensors(self) -> list[Tensor]:
        return [*self.pools, self.table] if self.pools else []

    def use(self, tensors: Sequence[Tensor]) -> None:
        *self.pools, self.table = tensors

    def commit(self, path: Tensor, base: Tensor) -> None:
        source = self._where(self.table, base[:, None] + path)
        target = self._where(self.table, base[:, None] + torch.arange(path.shape[1], device=path.device))
        for pool in self.pools:
            pool[target] = pool[source]
