"""Numbers of cache columns of executors with fixed shapes: powers of two, so that few shapes occur."""

import torch
from torch import Tensor

from specbench.component import Selections

SMALLEST_BUCKET = 128  # cache columns


class Columns(int):
    """A number of cache columns. Functions are traced for any such number: it becomes the length of a tensor."""

    def tensor(self) -> Tensor:
        """A tensor of this length, whose values nobody reads."""
        return torch.empty(self, dtype=torch.uint8)


def bucket(needed: int, capacity: int | None = None) -> int:
    """The next power of two from `needed` on, at least the smallest bucket and at most `capacity`."""
    size = max(SMALLEST_BUCKET, 1 << (needed - 1).bit_length())
    return size if capacity is None else min(size, capacity)


def bucket_lengths(columns: int) -> list[int]:
    """One text length, in tokens, in every bucket up to `columns`."""
    sizes = [SMALLEST_BUCKET]
    while sizes[-1] < columns:
        sizes.append(2 * sizes[-1])
    return [2, *(size // 2 + 1 for size in sizes[1:])]


def refuse_growing_cache(run: Selections) -> str | None:
    """`Component.refuses` of executors with fixed shapes: they need a cache with fixed shapes."""
    cache = run["cache"]
    return None if cache.kind.fixed_shapes else f"with cache={cache.name}: use cache=static or cache=paged"
