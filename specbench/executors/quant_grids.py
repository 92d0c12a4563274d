"""Grids of quantised weights: each value is a number of 4 or 8 bits times the scale of its row or group.

The scales have so few digits that every value of a grid is exact in float32 and bfloat16, so the quantised model is the
same in each. A weight on a grid shows that by its values: integers and scales need not travel with it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class QuantGrid:
    """Integers from -largest to largest, and scales of `digits` binary digits for each group of a row."""

    name: str
    bits: int
    largest: int
    digits: int
    group: int | None  # inputs that share a scale; None is a whole row

    def fits(self, inputs: int) -> bool:
        """Whether rows of so many inputs divide into groups."""
        return self.group is None or inputs % self.group == 0

    def parts(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Integers [out, in] int8 and scales [out, groups] float32 of the grid's values nearest to a weight
        [out, in]. A scale follows from the largest value of its group, and is the same for the rounded group."""
        groups = self._groups(weight.float())
        largest = groups.abs().amax(-1)
        scale = self._scale(largest)
        divisor = torch.where(scale > 0, scale, 1.0)
        integers = (groups / divisor[..., None]).round().clamp(-self.largest, self.largest)
        return integers.to(torch.int8).reshape(weight.shape), scale

    def rounded(self, weight: Tensor) -> Tensor:
        """The weight [out, in] with each value rounded to the grid, in the weight's dtype."""
        integers, scale = self.parts(weight)
        values = self._groups(integers.float()) * scale[..., None]
        return values.reshape(weight.shape).to(weight.dtype)

    def holds(self, weight: Tensor) -> bool:
        """Whether every value of a weight [out, in] is on the grid."""
        if weight.dim() != 2 or not weight.numel() or not self.fits(weight.shape[1]):
            return False
        return self._same(weight[:1]) and self._same(weight)  # the first row refuses most

    def _same(self, weight: Tensor) -> bool:
        return torch.equal(self.rounded(weight), weight)

    def _groups(self, values: Tensor) -> Tensor:
        """[out, in] as [out, groups, inputs of a group]."""
        return values.reshape(len(values), -1, self.group or values.shape[1])

    def _scale(self, largest: Tensor) -> Tensor:
        """The scale for groups with these largest values, both [out, groups]."""
        if self.digits == 1:  # a power of two, so that the largest integer of a group is more than half of `largest`
            exponent = torch.frexp(largest).exponent - self.bits + 1
            return torch.where(largest > 0, torch.ldexp(torch.ones_like(largest), exponent), 0.0)
        mantissa, exponent = torch.frexp(largest / self.largest)
        return torch.ldexp((mantissa * 2**self.digits).round() / 2**self.digits, exponent)


class FloatGrid(QuantGrid):
    """Numbers of e4m3 in place of integers, `largest` and less; the scale of a row is a power of two."""

    def parts(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """As in `QuantGrid`, the numbers in float8."""
        mantissa, exponent = torch.frexp(weight.float().abs().amax(-1, keepdim=True))
        exponent += mantissa >= 1 - 2.0**-5  # which e4m3 rounds to the next power of two
        scale = torch.where(mantissa > 0, torch.ldexp(torch.ones_like(mantissa), exponent - self.bits), 0.0)
        numbers = weight.float() / torch.where(scale > 0, scale, 1.0)
        return numbers.to(torch.float8_e4m3fn), scale


# bfloat16 has 8 digits: 7 of the integers and 1 of the scale, or 3 and 5.
INT8 = QuantGrid("int8", bits=8, largest=127, digits=1, group=None)
INT4 = QuantGrid("int4", bits=4, largest=7, digits=5, group=32)
FP8 = FloatGrid("fp8", bits=8, largest=256, digits=1, group=None)
GRIDS = {grid.name: grid for grid in (INT8, INT4, FP8)}
