"""A growing cache: columns are appended as they are needed, rollback crops them."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from specbench.cache.slots import SlotCache


class DynamicCache(SlotCache):
    """Every layer is always as long as its longest row."""

    fixed_shapes = False

    def empty(self, new: Tensor) -> Tensor:
        return new.new_zeros(self.rows, new.shape[1], 0, new.shape[3])

    def stored(self, layer_idx: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        found = super().stored(layer_idx, keys, values)
        missing = self.visible - found[0].shape[2]
        if missing > 0:
            found = F.pad(found[0], (0, 0, 0, missing)), F.pad(found[1], (0, 0, 0, missing))
            self.pools[2 * layer_idx : 2 * layer_idx + 2] = found
        return found

    def truncate(self, lengths: Sequence[int]) -> None:
        self.pools = [pool[:, :, : max(lengths)] for pool in self.pools]

    def commit(self, path: Tensor, base: Tensor) -> None:
        self.pools = [torch.clone(pool) for pool in self.pools]  # a cropped one is a view of a longer one
        super().commit(path, base)
