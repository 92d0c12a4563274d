"""Linear layers on CUDA that hold weights of a grid in 4 or 8 bits, and multiply few rows by them as they are."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specbench.executors.quant_grids import GRIDS, FloatGrid, QuantGrid
from specbench.kernels import ops

FEW_ROWS = 64  # of x, that the kernel multiplies; for more the weight is made wide first


def packed_weight(grid: QuantGrid, weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight [M, K] on the grid as bytes [M, W] and scales, [M] or, in 4 bits, [M, K / 32]. There the lower halves of
    the bytes are a row's first inputs, the upper ones the others."""
    numbers, scale = grid.parts(weight)
    if grid.group is None:
        return numbers.view(torch.uint8), scale[:, 0]
    width = bytes_of_row(grid, weight.shape[1])
    lower, upper = F.pad(numbers, (0, 2 * width - weight.shape[1])).split(width, 1)
    return (lower & 15 | upper << 4).view(torch.uint8), scale.to(torch.bfloat16)


def bytes_of_row(grid: QuantGrid, inputs: int) -> int:
    """W, for so many inputs; a multiple of a group in 4 bits."""
    return inputs if grid.group is None else grid.group * -(-inputs // (2 * grid.group))


def packed_bytes(grid: QuantGrid, outputs: int, inputs: int) -> int:
    """Bytes of a packed weight [outputs, inputs] and its scales."""
    return outputs * (bytes_of_row(grid, inputs) + (4 if grid.group is None else 2 * inputs // grid.group))


class QuantizedLinear(nn.Module):
    """Takes the place of a linear layer whose weight is on a grid."""

    stored: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, grid: QuantGrid, weight: Tensor, bias: Tensor | None):
        """weight [M, K], bias [M]."""
        super().__init__()
        stored, scale = packed_weight(grid, weight)
        self.floats, self.inputs = isinstance(grid, FloatGrid), weight.shape[1]
        self.numbers = weight.numel() + (0 if bias is None else bias.numel())
        self.weight = weight.new_empty(0)  # some models ask for its dtype
        for name, tensor in (("stored", stored), ("scale", scale), ("bias", bias)):
            self.register_buffer(name, tensor, persistent=False)
        self.bytes = stored.nbytes + scale.nbytes

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] to [..., M]."""
        if x.numel() > FEW_ROWS * self.inputs:
            product: Tensor = F.linear(x, self.wide(x.dtype), self.bias)
            return product
        y: Tensor = ops.multiply_few(x, self.stored, self.scale, self.floats)
        return y if self.bias is None else y + self.bias

    def wide(self, dtype: torch.dtype) -> Tensor:
        """The weight [M, K]. In bfloat16 numbers, scales and their products are exact (`quant_grids`)."""
        exact = dtype if dtype == torch.bfloat16 else torch.float32
        if self.scale.dim() == 1:
            numbers = self.stored.view(torch.float8_e4m3fn if self.floats else torch.int8)
            return (numbers.to(exact) * self.scale.to(exact)[:, None]).to(dtype)
        integers = self.stored.view(torch.int8)
        numbers = torch.cat([integers << 4 >> 4, integers >> 4], 1)[:, : self.inputs]
        groups: Tensor = numbers.unflatten(1, (self.scale.shape[1], -1)).to(exact) * self.scale[..., None]
        return groups.flatten(1).to(dtype)


def grid_of(weight: Tensor) -> QuantGrid | None:
    """The grid that a weight is on, if it is to be stored that way on its device."""
    if not ops.run_on(weight.device):
        return None
    return next((grid for grid in GRIDS.values() if grid.holds(weight)), None)
