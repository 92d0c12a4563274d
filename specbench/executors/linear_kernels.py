"""Ways to multiply by the weight of a linear layer on a CPU. Which is fastest depends on machine, shape and rows."""

import functools
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from specbench.executors.native import half_pairs
from specbench.executors.quant_grids import INT4, INT8, QuantGrid

INT4_ROWS = 16  # the layout of the kernel for 4 bits needs a multiple of so many outputs
ONEDNN_ROWS = 16  # rows of x that oneDNN's layout is made for: the fastest, or equal, for 1 to 512 rows
HALF_EXPONENT = 15  # of the largest weight in float16, after scaling
PAIRED, LINE = 2, 16  # of kernels/half_pairs.cpp
BLOCK = 2**17  # numbers of a weight that are compared at once
FEW = 2**17  # bytes of a weight that several threads do not read faster than one

_onednn: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default
_fbgemm: Callable[..., Tensor] = torch.ops.quantized.linear_dynamic_fp16.default
_int8: Callable[..., Tensor] = torch.ops.aten._weight_int8pack_mm.default
_pack_int4: Callable[..., Tensor] = torch.ops.aten._convert_weight_to_int4pack_for_cpu.default
_int4: Callable[..., Tensor] = torch.ops.aten._weight_int4pack_mm_for_cpu.default


class Product(ABC):
    """x [..., in] times a weight [out, in], plus bias [out], in one stored layout of the weight."""

    name: ClassVar[str]
    rounds_inputs: ClassVar[bool] = False  # whether it may serve a drafter by rounding x to bfloat16
    bytes: int  # of the weight that one product reads
    bias: Tensor | None

    @abstractmethod
    def __init__(self, weight: Tensor, bias: Tensor | None):
        """Stores the weight [out, in] and bias [out] in its layout."""

    @classmethod
    @abstractmethod
    def offers(cls, weight: Tensor) -> bool:
        """Whether it multiplies by exactly this weight [out, in], in the arithmetic of the weight's dtype."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """x [..., in] to [..., out]."""

    def into(self, x: Tensor, y: Tensor) -> Tensor:
        """Writes the product of contiguous x [..., in] into y [..., out], and returns y."""
        return y.copy_(self(x))


class Plain(Product):
    """PyTorch's own product."""

    name = "plain"

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.weight, self.bias, self.bytes = weight, bias, weight.nbytes

    @classmethod
    def offers(cls, weight: Tensor) -> bool:
        return True

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class OneDnn(Product):
    """oneDNN, on a weight that was laid out once for it."""

    name = "onednn"

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, ONEDNN_ROWS)
        self.bias, self.bytes = bias, weight.nbytes

    @classmethod
    def offers(cls, weight: Tensor) -> bool:
        if not torch.backends.mkldnn.is_available():
            return False
        return weight.dtype == torch.float32 or (
            weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        )

    def __call__(self, x: Tensor) -> Tensor:
        return _onednn(x, self.packed, self.bias, "none", [], "")


class HalfWeight(Product):
    """FBGEMM, with the weight stored in float16 and all arithmetic in float32. Offered where the weight survives that
    unchanged: the values of a checkpoint in 16 bits do, once `scale_of` has brought them into float16's range. With
    AVX-512 the result of a row does not depend on the number of rows; elsewhere its rounding does."""

    name = "half"

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.packed: Any = torch.ops.quantized.linear_prepack_fp16(weight, None)
        self.bias, self.bytes = bias, weight.nbytes // 2

    @classmethod
    def offers(cls, weight: Tensor) -> bool:
        return "fbgemm" in torch.backends.quantized.supported_engines and is_half(weight)

    def __call__(self, x: Tensor) -> Tensor:
        y = _fbgemm(x, self.packed)
        return y if self.bias is None else y.add_(self.bias)


class HalfPairs(HalfWeight):
    """The product of kernels/half_pairs.cpp, which all threads share. The result of a row does not depend on the number
    of rows. Offered where a C++ compiler is found."""

    name = "half_pairs"
    factor = 1.0  # of the result, before the bias

    def __init__(self, weight: Tensor, bias: Tensor | None):
        pairs = weight.half().view(-1, PAIRED, weight.shape[1] // LINE, LINE)
        self.packed: Tensor = pairs.transpose(1, 2).contiguous()
        (self.outputs, self.inputs), self.bias, self.bytes = weight.shape, bias, weight.nbytes // 2

    @classmethod
    def offers(cls, weight: Tensor) -> bool:
        even = weight.shape[1] % LINE == 0 and len(weight) % PAIRED == 0
        return even and is_half(weight) and half_pairs() is not None  # which is compiled for such weights alone

    def __call__(self, x: Tensor) -> Tensor:
        return self.into(x.contiguous(), x.new_empty(*x.shape[:-1], self.outputs))

    def into(self, x: Tensor, y: Tensor) -> Tensor:
        function: Any = half_pairs()
        threads = torch.get_num_threads() if self.bytes > FEW else 1
        addresses = x.data_ptr(), self.packed.data_ptr(), y.data_ptr()
        function(*addresses, x.numel() // self.inputs, self.inputs, self.outputs, self.factor, threads)
        return y if self.bias is None else y.add_(self.bias)


class HalfWeightSerial(HalfWeight):
    """The same product in one thread, by an operator that is called faster: the fastest where a weight is small.
    PyTorch calls it deprecated; where it is gone this product is not offered."""

    name = "half_serial"

    def __init__(self, weight: Tensor, bias: Tensor | None):
        with warnings.catch_warnings(action="ignore"):  # PyTorch calls the operator deprecated
            self.packed = torch.fbgemm_pack_gemm_matrix_fp16(weight)
        self.bias, self.bytes = bias, weight.nbytes // 2

    @classmethod
    def offers(cls, weight: Tensor) -> bool:
        return super().offers(weight) and has_serial()

    def __call__(self, x: Tensor) -> Tensor:
        return torch.fbgemm_linear_fp16_weight_fp32_activation(x, self.packed, self.bias)


def is_half(weight: Tensor) -> bool:
    """Whether float16 has all values of a weight in float32. Read in blocks that stay in a core's cache."""
    if weight.dtype != torch.float32:
        return False
    return all(torch.equal(block.half().float(), block) for block in weight.reshape(-1).split(BLOCK))


@functools.cache
def has_serial() -> bool:
    """Whether this version of PyTorch has the operators of HalfWeightSerial, which warn at their first call."""
    try:
        with warnings.catch_warnings(action="ignore"):
            packed = torch.fbgemm_pack_gemm_matrix_fp16(torch.zeros(8, 8))
            torch.fbgemm_linear_fp16_weight_fp32_activation(torch.zeros(1, 8), packed, None)
    except (AttributeError, TypeError, RuntimeError):
        return False
    return True


def scale_of(weight: Tensor) -> float:
    """The power of two that brings the largest value of a weight, of any shape, to the upper end of float16's range.
    Multiplying by it changes no digit."""
    largest = float(torch.stack(weight.aminmax()).abs().max()) if weight.numel() else 0.0
    if weight.dtype != torch.float32 or not 2.0**-60 < largest < 2.0**60:
        return 1.0
    return 2.0 ** (HALF_EXPONENT - math.frexp(largest)[1])


class Quantized(Product):
    """A weight on a grid, as integers and scales, times x in bfloat16, by PyTorch's own kernels. The sums are kept in
    float32. A weight in float32 is taken too; then the result differs by more than the rounding of float32: in float32
    the same kernels are loops without vector instructions, far slower than `half`."""

    grid: ClassVar[QuantGrid]
    rounds_inputs = True

    @classmethod
    def offers(cls, weight: Tensor) -> bool:
        packs = cls.grid.group is None or (len(weight) % INT4_ROWS == 0 and cls.grid.fits(weight.shape[1]))
        return weight.dtype == torch.bfloat16 and packs and cls.grid.holds(weight)

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).to(torch.bfloat16).contiguous()  # some kernels take no other layout
        y = self.product(rows)
        y = y.view(*x.shape[:-1], y.shape[-1]).to(x.dtype)
        return y if self.bias is None else y.add_(self.bias)

    @abstractmethod
    def product(self, rows: Tensor) -> Tensor:
        """rows [n, in] to [n, out], both in bfloat16, without the bias."""


class Int8(Quantized):
    """8 bits, and one scale for each row of the weight."""

    name, grid = "int8", INT8

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.integers, scale = self.grid.parts(weight)
        self.scale, self.bias = scale[:, 0].to(torch.bfloat16), bias
        self.bytes = self.integers.nbytes + self.scale.nbytes

    def product(self, rows: Tensor) -> Tensor:
        return _int8(rows, self.integers, self.scale)


class Int4(Quantized):
    """4 bits, and one scale for each group of 32 inputs."""

    name, grid = "int4", INT4

    def __init__(self, weight: Tensor, bias: Tensor | None):
        # The kernel's integers are from 0 to 15, of which it subtracts 8; each scale comes with an offset, here 0.
        integers, scale = self.grid.parts(weight)
        self.packed, self.bias = _pack_int4(integers.int() + 8, 1), bias
        scales = torch.stack([scale.T, torch.zeros_like(scale.T)], -1)  # [groups, out, 2]
        self.scales = scales.to(torch.bfloat16).contiguous()
        self.bytes = self.packed.nbytes + self.scales.nbytes

    def product(self, rows: Tensor) -> Tensor:
        return _int4(rows, self.packed, self.grid.group, self.scales)


# Of two that are as fast, the first is taken.
QUANTIZED: Sequence[type[Product]] = (Int4, Int8)
KINDS: Sequence[type[Product]] = (HalfPairs, HalfWeight, HalfWeightSerial, OneDnn, Plain)
