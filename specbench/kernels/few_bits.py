"""Products of few rows with a quantised weight, in Triton: it is read as integers and scales, never as wide numbers.

A program multiplies ROWS rows, some of them empty, with TILE outputs. The order of a row's sums depends on the weight's
shape alone, so a row's result is the same, bit for bit, whoever else is multiplied. Sums are in float32.

n rows, K inputs, M outputs, W bytes of a stored row, G groups of 32 inputs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, TILE = 8, 16  # the fewest that tensor cores take
STEP = 512  # bytes of a stored row that a program reads before the next ones
GROUP = 32  # inputs that share a scale in 4 bits
WARPS, STAGES = 4, 4


@triton.jit
def _read(at, there, EVEN: tl.constexpr):
    """What lies at addresses, 0 where it is not `there`; all is, if shapes are even."""
    return tl.load(at) if EVEN else tl.load(at, mask=there, other=0)


@triton.jit
def _number(byte, kind: tl.constexpr, FLOAT: tl.constexpr, NATIVE: tl.constexpr):
    """The numbers that bytes stand for, without their scale: int8 or, if FLOAT, e4m3."""
    if not FLOAT:
        found = byte.to(tl.int8, bitcast=True).to(kind)
    elif NATIVE:  # from compute capability 8.9 on
        found = byte.to(tl.float8e4nv, bitcast=True).to(kind)
    else:  # exponent and mantissa are the lower ones of float16
        wide = byte.to(tl.int16)
        found = (((wide & 128) << 8) | ((wide & 127) << 7)).to(tl.float16, bitcast=True).to(tl.float32)
        found = (found * 256).to(kind)  # the difference of the exponents' biases
    return found


@triton.jit(do_not_specialize=["n"])
def _multiply_few(
    x, stored, scale, out, n, K, M, W, G,
    BITS: tl.constexpr, FLOAT: tl.constexpr, NATIVE: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, PARTS: tl.constexpr, BYTES: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """out [n, M] of x [n, K], both contiguous. In a step PARTS sums advance by BYTES bytes each: with 4 bits by a
    group of inputs in the lower halves of the bytes, and by one in the upper halves."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[None, None, :]
    output = tl.program_id(1) * TILE + tl.arange(0, TILE)[None, :, None]
    part, byte = tl.arange(0, PARTS)[:, None, None], tl.arange(0, BYTES)
    kind = tl.float32 if WIDEN else x.dtype.element_ty
    total = tl.zeros([PARTS, TILE, ROWS], tl.float32)
    for begin in range(0, W, PARTS * BYTES):
        first = begin + part * BYTES
        deep, high = first + byte[None, None, :], first + byte[None, :, None]  # in the weight, in x
        packed = _read(stored + output.to(tl.int64) * W + deep, (output < M) & (deep < W), EVEN)
        at_x = x + row.to(tl.int64) * K + high
        y = tl.load(at_x, mask=(row < n) if EVEN else (row < n) & (high < K), other=0.0).to(kind)
        if BITS == 4:  # each half is read as the upper one of a byte, 16 times as large
            z = tl.load(at_x + W, mask=(row < n) if EVEN else (row < n) & (high + W < K), other=0.0).to(kind)
            group = first // BYTES
            at = scale + output * G + group
            lower = _read(at, (output < M) & (group < G), EVEN).to(tl.float32) / 16
            upper = _read(at + W // BYTES, (output < M) & (group + W // BYTES < G), EVEN).to(tl.float32) / 16
            total += tl.dot(_number(packed << 4, kind, FLOAT, NATIVE), y, input_precision=PRECISION) * lower
            total += tl.dot(_number(packed & 240, kind, FLOAT, NATIVE), z, input_precision=PRECISION) * upper
        else:
            total = tl.dot(_number(packed, kind, FLOAT, NATIVE), y, total, input_precision=PRECISION)
    sums = tl.sum(total, 0, keep_dims=True)
    if BITS == 8:
        sums *= tl.load(scale + output, mask=output < M, other=0.0)
    tl.store(out + row.to(tl.int64) * M + output, sums.to(out.dtype.element_ty), mask=(row < n) & (output < M))


def multiply(x: Tensor, stored: Tensor, scale: Tensor, floats: bool) -> Tensor:
    """[n, M] of x [n, K], a stored weight [M, W] and its scales, [M, G] of 4 bits and [M] of 8: `ops.multiply_few`."""
    (n, K), (M, W) = x.shape, stored.shape
    bits, parts, size = (8, WARPS, STEP // WARPS) if scale.dim() == 1 else (4, STEP // GROUP, GROUP)
    out = torch.empty(n, M, dtype=x.dtype, device=x.device)
    interpreted = triton.knobs.runtime.interpret
    _multiply_few[(triton.cdiv(n, ROWS), triton.cdiv(M, TILE))](
        x.contiguous(), stored, scale, out, n, K, M, W, scale.shape[-1],
        BITS=bits, FLOAT=floats, NATIVE=not interpreted and torch.cuda.get_device_capability(x.device) >= (8, 9),
        EVEN=M % TILE == 0 and W % STEP == 0 and K * bits == W * 8, ROWS=ROWS, TILE=TILE, PARTS=parts, BYTES=size,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", WIDEN=interpreted,
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return out
