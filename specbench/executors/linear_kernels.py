"""Ways to multiply by the weight of a linear layer on a CPU. Which is fastest depends on machine, shape and rows."""

import functools
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

ONEDNN_ROWS = 16  # rows of x that oneDNN's layout is made for: the fastest, or equal, for 1 to 512 rows
HALF_EXPONENT = 15  # of the largest weight in float16, after scaling

_onednn: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default
_fbgemm: Callable[..., Tensor] = torch.ops.quantized.linear_dynamic_fp16.default


class Product(ABC):
    """x [..., in] times a weight [out, in], plus bias [out], in one stored layout of the weight."""

    name: ClassVar[str]
    rounds_inputs: ClassVar[bool] = False  # whether it may serve a drafter by rounding x to bfloat16
    bytes: int  # of the weight that one product reads

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
    """FBGEMM, with the weight stored in float16 and all arithmetic in float32.

    Offered where the weight survives that unchanged: the values of a checkpoint in 16 bits do, once `scale_of` has
    brought them into float16's range. The result of a row does not depend on the number of rows.
    """

    name = "half"

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.packed: Any = torch.ops.quantized.linear_prepack_fp16(weight, None)
        self.bias, self.bytes = bias, weight.nbytes // 2

    @classmethod
    def offers(cls, weight: Tensor) -> bool:
        if weight.dtype != torch.float32 or "fbgemm" not in torch.backends.quantized.supported_engines:
            return False
        return torch.equal(weight.half().float(), weight)

    def __call__(self, x: Tensor) -> Tensor:
        y = _fbgemm(x, self.packed)
        return y if self.bias is None else y.add_(self.bias)


class HalfWeightSerial(HalfWeight):
    """The same product in one thread, by an operator that is called faster: the fastest where a weight is small.
    PyTorch calls it deprecated; where it is gone this product is not offered."""

    name = "half_serial"

    def __init__(self, weight: Tensor, bias: Tensor | None):
        with _deprecated():
            self.packed = torch.fbgemm_pack_gemm_matrix_fp16(weight)
        self.bias, self.bytes = bias, weight.nbytes // 2

    @classmethod
    def offers(cls, weight: Tensor) -> bool:
        return super().offers(weight) and has_serial()

    def __call__(self, x: Tensor) -> Tensor:
        return torch.fbgemm_linear_fp16_weight_fp32_activation(x, self.packed, self.bias)


@functools.cache
def has_serial() -> bool:
    """Whether this version of PyTorch has the operators of HalfWeightSerial, which warn at their first call."""
    try:
        with _deprecated():
            packed = torch.fbgemm_pack_gemm_matrix_fp16(torch.zeros(8, 8))
            torch.fbgemm_linear_fp16_weight_fp32_activation(torch.zeros(1, 8), packed, None)
    except (AttributeError, TypeError, RuntimeError):
        return False
    return True


@contextmanager
def _deprecated() -> Iterator[None]:
    """Without the warnings of operators that PyTorch calls deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def scale_of(weight: Tensor) -> float:
    """The power of two that brings the largest value of a weight, of any shape, to the upper end of float16's range.
    Multiplying by it changes no digit."""
    largest = float(weight.abs().max()) if weight.numel() else 0.0
    if weight.dtype != torch.float32 or not 2.0**-60 < largest < 2.0**60:
        return 1.0
    return 2.0 ** (HALF_EXPONENT - math.frexp(largest)[1])


KINDS: Sequence[type[Product]] = (
    HalfWeight,
    HalfWeightSerial,
    OneDnn,
    Plain,
)  # of two that are as fast, the first is taken
