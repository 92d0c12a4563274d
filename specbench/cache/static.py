"""Contiguous columns, allocated once: rollback writes nothing, because stale columns are never visible."""

from collections.abc import Sequence

from specbench.cache.slots import SlotCache


class StaticCache(SlotCache):
    """Allocates all columns in the first forward; each token overwrites the column of its position."""

    def truncate(self, lengths: Sequence[int]) -> None:
        """Does nothing: columns beyond a row's length are overwritten before they can be seen."""
