"""Shape buckets: executors with fixed shapes attend to a power of two of cache columns, so that few shapes occur."""

from specbench.component import Selections

SMALLEST_BUCKET = 128  # cache columns


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
    if cache.kind.fixed_shapes:
        return None
    return f"with cache={cache.name}: use cache=static or cache=paged"
