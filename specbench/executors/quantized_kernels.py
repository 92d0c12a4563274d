"""Products whose stored weight has 8 or 4 bits, by PyTorch's own kernels. They round inputs and results to bfloat16.

In float32 the same kernels are loops without vector instructions, far slower than `half`: not used.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from specbench.executors.linear_kernels import Product
from specbench.executors.quant_grids import INT4, INT8, QuantGrid

_int8: Callable[..., Tensor] = torch.ops.aten._weight_int8pack_mm.default
_pack_int4: Callable[..., Tensor] = torch.ops.aten._convert_weight_to_int4pack_for_cpu.default
_int4: Callable[..., Tensor] = torch.ops.aten._weight_int4pack_mm_for_cpu.default

INT4_ROWS = 16  # the kernel's layout needs a multiple of so many outputs


class Quantized(Product):
    """A weight on a grid, as integers and scales, times x in bfloat16. The sums are kept in float32.

    A weight in float32 is taken too; then the result differs from the product in float32 by more than its rounding.
    """

    grid: ClassVar[QuantGrid]
    rounds_inputs = True

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.bias, self.features = bias, len(weight)
        self.bytes = self._pack(*self.grid.parts(weight))

    @classmethod
    def offers(cls, weight: Tensor) -> bool:
        return weight.dtype == torch.bfloat16 and cls.packs(weight) and cls.grid.holds(weight)

    @classmethod
    def packs(cls, weight: Tensor) -> bool:
        """Whether the kernel has a layout for weights of this shape [out, in]."""
        return True

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).to(torch.bfloat16).contiguous()  # some kernels take no other layout
        y = self._product(rows).view(*x.shape[:-1], self.features).to(x.dtype)
        return y if self.bias is None else y.add_(self.bias)

    @abstractmethod
    def _pack(self, integers: Tensor, scale: Tensor) -> int:
        """Stores the weight, given as integers [out, in] and scales [out, groups]; returns its bytes."""

    @abstractmethod
    def _product(self, rows: Tensor) -> Tensor:
        """rows [n, in] to [n, out], both in bfloat16, without the bias."""


class Int8(Quantized):
    """8 bits, and one scale for each row of the weight."""

    name, grid = "int8", INT8

    def _pack(self, integers: Tensor, scale: Tensor) -> int:
        self.integers, self.scale = integers, scale[:, 0].to(torch.bfloat16)
        return self.integers.nbytes + self.scale.nbytes

    def _product(self, rows: Tensor) -> Tensor:
        return _int8(rows, self.integers, self.scale)


class Int4(Quantized):
    """4 bits, and one scale for each group of 32 inputs."""

    name, grid = "int4", INT4

    @classmethod
    def packs(cls, weight: Tensor) -> bool:
        return len(weight) % INT4_ROWS == 0 and cls.grid.fits(weight.shape[1])

    def _pack(self, integers: Tensor, scale: Tensor) -> int:
        # The kernel's integers are from 0 to 15, of which it subtracts 8; each scale comes with an offset, here 0.
        self.packed = _pack_int4(integers.int() + 8, 1)
        scales = torch.stack([scale.T, torch.zeros_like(scale.T)], -1)  # [groups, out, 2]
        self.scales = scales.to(torch.bfloat16).contiguous()
        return self.packed.nbytes + self.scales.nbytes

    def _product(self, rows: Tensor) -> Tensor:
        return _int4(rows, self.packed, self.grid.group, self.scales)


QUANTIZED: Sequence[type[Product]] = (Int4, Int8)
