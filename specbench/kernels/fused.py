"""The products of a Llama-like decoder layer for few new tokens, in Triton, each fused with what stands around it.

With the kernel of attention a layer is five launches: `project`, `attend`, `multiply` (W_o), `gate`, `multiply`
(W_down). Its input is read as three tensors that the kernel before has written: x itself, x times the weight of the
norm that comes next, and the sums of squares of x, by the blocks of columns that one program wrote. A norm's factor is
one number a row, and so it is applied to the sums of the product.

Every product pads its rows to ROWS, and sums over its inputs in one order that follows from its widths alone. A row's
result therefore has the same bits whatever stands in the other rows, and however many there are.

R rows (the new tokens of all texts), H hidden, P blocks of columns of x, D head size, V vocabulary.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16  # of a tile: the least that tensor cores multiply
MANY, VERY_MANY = 3072, 16384  # output columns from which on wider blocks leave few multiprocessors of a GPU idle
STAGE, STAGES = 2**14, 4  # bytes of weights that are read at a time, and how many such pieces are on their way
SILU, GELU = 1, 2  # activations of the gate
VARY = ["R", "N", "M", "key_heads", "depth_row", "table_row"]  # from call to call: one kernel serves all values
ANYWHERE = ["words", "first", "depth", "table", "squares"]  # parts of other tensors, at any address


def columns_of_tile(columns: int, pair: bool = False) -> int:
    """Output columns of a program, of a product of so many, and with `pair` of a second one beside it."""
    return 64 if columns >= VERY_MANY and not pair else 32 if columns >= MANY else 16


def inputs_of_tile(columns: int, inputs: int, dtype: torch.dtype) -> int:
    """Inputs that are multiplied at a time, for so many output columns of a program."""
    most = STAGE // (dtype.itemsize * columns)
    return next((size for size in (256, 128, 64, 32) if size <= most and inputs % size == 0), 32)


class Stream(NamedTuple):
    """The tokens' vectors between two layers, as the next product reads them."""

    x: Tensor  # [R, H]
    scaled: Tensor  # [R, H], x times the weight of the norm that comes next
    squares: Tensor  # [R, P] float32, sums of squares of x

    def like(self) -> "Stream":
        """An empty one of the same shapes."""
        return Stream(*(torch.empty_like(t) for t in self))


@triton.jit
def sums(
    x, first, second, row, real, inside, K,
    BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, PAIR: tl.constexpr, PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """x [R, K] times rows of weights at pointers first [BN], with PAIR second [BN] too: tiles [ROWS, BN] float32."""
    k = tl.arange(0, BK)
    at_x = x + row[:, None] * K + k[None, :]
    at_first, at_second = first[None, :] + k[:, None], second[None, :] + k[:, None]
    a = tl.zeros([row.shape[0], BN], tl.float32)
    b = tl.zeros([row.shape[0], BN], tl.float32)
    for begin in range(0, K, BK):
        mask_x, mask_w = real[:, None], inside[None, :]
        if not EVEN:
            mask_x, mask_w = mask_x & (begin + k < K)[None, :], mask_w & (begin + k < K)[:, None]
        u = tl.load(at_x + begin, mask=mask_x, other=0.0)
        v = tl.load(at_first + begin, mask=mask_w, other=0.0)
        if WIDEN:
            u, v = u.to(tl.float32), v.to(tl.float32)
        a = tl.dot(u, v, a, input_precision=PRECISION)
        if PAIR:
            w = tl.load(at_second + begin, mask=mask_w, other=0.0)
            if WIDEN:
                w = w.to(tl.float32)
            b = tl.dot(u, w, b, input_precision=PRECISION)
    return a, b


@triton.jit
def norm_factor(squares, row, real, P, H, eps, BP: tl.constexpr):
    """1 / the root of the mean square of each row [ROWS], from its sums of squares."""
    block = tl.arange(0, BP)
    at = squares + row[:, None] * P + block[None, :]
    parts = tl.load(at, mask=real[:, None] & (block < P)[None, :], other=0.0)
    return tl.rsqrt(tl.sum(parts, 1) / H + eps)


@triton.jit
def store_stream(y, x, scaled, squares, gain, row, column, real, inside, H, P, block):
    """Writes a tile y [ROWS, BN] float32 of a `Stream`; gain [H] is the weight of the norm that comes next."""
    there = real[:, None] & inside[None, :]
    rounded = y.to(x.dtype.element_ty)
    at = row[:, None] * H + column[None, :]
    tl.store(x + at, rounded, mask=there)
    wide = tl.where(there, rounded.to(tl.float32), 0.0)
    next_gain = tl.load(gain + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(scaled + at, (wide * next_gain[None, :]).to(scaled.dtype.element_ty), mask=there)
    tl.store(squares + row * P + block, tl.sum(wide * wide, 1), mask=real)


@triton.jit(do_not_specialize=["R"], do_not_specialize_on_alignment=ANYWHERE)
def begin_kernel(
    words, table, gain, x, scaled, squares, R, H, P, GATHER: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """The stream in front of the first layer: rows of the embedding table, or vectors that are given."""
    row, block = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    column, real = block * BN + tl.arange(0, BN), row < R
    inside, place = column < H, row.to(tl.int64)
    if GATHER:
        place = tl.load(words + row, mask=real, other=0).to(tl.int64)
    y = tl.load(table + place[:, None] * H + column[None, :], mask=real[:, None] & inside[None, :], other=0.0)
    store_stream(y.to(tl.float32), x, scaled, squares, gain, row, column, real, inside, H, P, block)


@triton.jit(do_not_specialize=VARY, do_not_specialize_on_alignment=ANYWHERE)
def project_kernel(
    x, squares, w_q, w_k, w_v, b_q, b_k, b_v, norm_q, norm_k, cosines, sines, first, depth, table, q, keys, values,
    R, N, M, H, P, heads, key_heads, depth_row, table_row, width, block, limit,
    k_block, k_head, k_column, v_block, v_head, v_column, eps, eps_q, eps_k,
    D: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BP: tl.constexpr, EVEN: tl.constexpr,
    BIAS: tl.constexpr, NORM: tl.constexpr, TREE: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Norm, the products with W_q, W_k and W_v, the norms of q and k, and their rotation: q [R, heads, D], and keys and
    values in the columns of their tokens, where the cache has them. A program has BN columns of the first half of a
    head and the same of the second, which are rotated with each other."""
    HALF: tl.constexpr = D // 2
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    parts = tl.cdiv(HALF, BN)
    head, part = tl.program_id(1) // parts, tl.program_id(1) % parts
    column, real = part * BN + tl.arange(0, BN), row < R
    inside = column < HALF
    is_q, is_v = head < heads, head >= heads + key_heads
    own = tl.where(is_q, head, tl.where(is_v, head - heads - key_heads, head - heads))  # its number among its kind
    w = tl.where(is_q, w_q, tl.where(is_v, w_v, w_k))
    at = w + (own * D + column).to(tl.int64) * H
    a, b = sums(x, at, at + HALF * H, row, real, inside, H, BN, BK, EVEN, True, PRECISION, WIDEN)
    factor = norm_factor(squares, row, real, P, H, eps, BP)[:, None]
    a, b = a * factor, b * factor
    if BIAS:
        at_bias = tl.where(is_q, b_q, tl.where(is_v, b_v, b_k)) + own * D + column
        a += tl.load(at_bias, mask=inside, other=0.0).to(tl.float32)[None, :]
        b += tl.load(at_bias + HALF, mask=inside, other=0.0).to(tl.float32)[None, :]
    if NORM:
        own_eps = tl.where(is_q, eps_q, eps_k)
        own_factor = tl.rsqrt(tl.sum(a * a + b * b, 1) / D + own_eps)[:, None]
        at_norm = tl.where(is_q, norm_q, norm_k) + column
        gain_a = tl.load(at_norm, mask=inside, other=0.0).to(tl.float32)[None, :]
        gain_b = tl.load(at_norm + HALF, mask=inside, other=0.0).to(tl.float32)[None, :]
        a = tl.where(is_v, a, a * own_factor * gain_a)
        b = tl.where(is_v, b, b * own_factor * gain_b)

    text, n = row // N, row % N
    start = tl.load(first + text, mask=real, other=0)
    slot = tl.maximum(start + n, 0)  # a token before column 0 stands for the one there
    position = slot
    if TREE:
        position = tl.maximum(start + N - M + tl.load(depth + text * depth_row + n, mask=real, other=0), 0)
    at_angle = tl.minimum(position, limit - 1).to(tl.int64)[:, None] * D + column[None, :]
    there = real[:, None] & inside[None, :]
    cosine = tl.load(cosines + at_angle, mask=there, other=0.0).to(tl.float32)
    sine = tl.load(sines + at_angle, mask=there, other=0.0).to(tl.float32)
    turned_a = tl.where(is_v, a, a * cosine - b * sine)
    turned_b = tl.where(is_v, b, b * cosine + a * sine)

    number = tl.load(table + text * table_row + tl.minimum(slot // block, width - 1), mask=real, other=0).to(tl.int64)
    within, place = (slot % block).to(tl.int64), row.to(tl.int64)
    at_keys = number * k_block + own * k_head + within * k_column
    at_values = number * v_block + own * v_head + within * v_column
    offset = tl.where(is_q, (place * heads + own) * D, tl.where(is_v, at_values, at_keys))
    out = tl.where(is_q, q, tl.where(is_v, values, keys)) + offset[:, None] + column[None, :]
    fits = tl.where(is_q, real, real & (slot < width * block))[:, None] & inside[None, :]
    tl.store(out, turned_a.to(q.dtype.element_ty), mask=fits)
    tl.store(out + HALF, turned_b.to(q.dtype.element_ty), mask=fits)


@triton.jit(do_not_specialize=["R"], do_not_specialize_on_alignment=ANYWHERE)
def multiply_kernel(
    x, squares, w, w_up, bias, bias_up, residual, gain, out, scaled, out_squares, R, K, C, P, eps,
    ROWS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BP: tl.constexpr, EVEN: tl.constexpr, NORM: tl.constexpr,
    BIAS: tl.constexpr, GATE: tl.constexpr, RESIDUAL: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """x [R, K] times w [C, K]: with NORM after the norm that x was scaled for; with GATE the activation of this, times
    the product with w_up; with RESIDUAL added to the residual [R, C], as a `Stream` for the next norm's gain [C]."""
    row, block = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    column, real = block * BN + tl.arange(0, BN), row < R
    inside = column < C
    offset = column.to(tl.int64) * K
    a, b = sums(x, w + offset, w_up + offset, row, real, inside, K, BN, BK, EVEN, GATE != 0, PRECISION, WIDEN)
    if NORM:
        factor = norm_factor(squares, row, real, P, K, eps, BP)[:, None]
        a, b = a * factor, b * factor
    if BIAS:
        a += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        if GATE:
            b += tl.load(bias_up + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    if GATE == 1:
        a = a * tl.sigmoid(a) * b
    elif GATE == 2:  # 1 + tanh(z) is 2 sigmoid(2 z)
        a = a * tl.sigmoid(1.5957691216057308 * (a + 0.044715 * a * a * a)) * b
    there = real[:, None] & inside[None, :]
    place = row.to(tl.int64)
    if RESIDUAL:
        a += tl.load(residual + place[:, None] * C + column[None, :], mask=there, other=0.0).to(tl.float32)
        store_stream(a, out, scaled, out_squares, gain, row, column, real, inside, C, tl.num_programs(1), block)
    else:
        tl.store(out + place[:, None] * C + column[None, :], a.to(out.dtype.element_ty), mask=there)


def begin(words: Tensor, table: Tensor, gain: Tensor) -> Stream:
    """The stream of tokens words [R] with embeddings table [V, H], or of vectors [R, H]. gain [H]: the first norm's."""
    gather, (R, H) = not words.is_floating_point(), (len(words), table.shape[1])
    BN = columns_of_tile(H)
    P = triton.cdiv(H, BN)
    x = torch.empty(R, H, dtype=table.dtype, device=table.device)
    stream = Stream(x, torch.empty_like(x), x.new_empty(R, P, dtype=torch.float32))
    source = table if gather else words.contiguous()
    begin_kernel[(triton.cdiv(R, ROWS), P)](words, source, gain, *stream, R, H, P, gather, ROWS, BN, num_warps=2)
    return stream


class Heads(NamedTuple):
    """What makes the queries, keys and values of a layer: biases and norms are None where there are none."""

    weights: tuple[Tensor, Tensor, Tensor]  # of q, k and v, [columns, H]
    biases: tuple[Tensor, Tensor, Tensor] | None
    q_norm: tuple[Tensor, float] | None  # of each head: gain [D], and eps
    k_norm: tuple[Tensor, float] | None
    eps: float  # of the norm in front
    size: int  # D

    @property
    def key_heads(self) -> int:
        return len(self.weights[1]) // self.size


class Places(NamedTuple):
    """Where the new tokens of a forward stand, as `attend` explains it."""

    shape: tuple[int, int]  # b rows, N new tokens
    first: Tensor  # [b]
    table: Tensor  # [b, width]
    angles: tuple[Tensor, Tensor]  # cosines and sines [positions, D]
    sees: Tensor | None  # [1 or b, N, M]
    depth: Tensor | None  # [1 or b, N]


def project(stream: Stream, heads: Heads, places: Places, keys: Tensor, values: Tensor) -> Tensor:
    """q [b, heads, N, D] of new tokens, rotated. Their keys and values go into the blocks that `attend` reads."""
    (R, H), (b, N), D = stream.x.shape, places.shape, heads.size
    q_heads, key_heads = len(heads.weights[0]) // D, heads.key_heads
    BN = 16 if heads.q_norm is None else max(16, triton.next_power_of_2(D // 2))  # a norm needs all of a head
    BK = inputs_of_tile(2 * BN, H, stream.x.dtype)
    parts = triton.cdiv(D // 2, BN)
    q = stream.x.new_empty(R, q_heads, D)
    (q_gain, q_eps), (k_gain, k_eps) = heads.q_norm or (stream.x, 0.0), heads.k_norm or (stream.x, 0.0)
    place = places.first if places.depth is None else places.depth.expand(b, -1)
    project_kernel[(triton.cdiv(R, ROWS), (q_heads + 2 * key_heads) * parts)](
        stream.scaled, stream.squares, *heads.weights, *(heads.biases or (stream.x,) * 3), q_gain, k_gain,
        *places.angles, places.first, place, places.table, q, keys, values,
        R, N, N if places.sees is None else places.sees.shape[2], H, stream.squares.shape[1], q_heads, key_heads,
        place.stride(0), places.table.stride(0), places.table.shape[1], keys.shape[2], len(places.angles[0]),
        *keys.stride()[:3], *values.stride()[:3], heads.eps, q_eps, k_eps,
        D=D, ROWS=ROWS, BN=BN, BK=BK, BP=triton.next_power_of_2(stream.squares.shape[1]), EVEN=H % BK == 0,
        BIAS=heads.biases is not None, NORM=heads.q_norm is not None, TREE=places.sees is not None,
        **kind_of(stream.x), num_warps=min(4, BN // 8), num_stages=STAGES,
    )  # fmt: skip
    return q.view(b, N, q_heads, D).transpose(1, 2)


def add(x: Tensor, weight: Tensor, bias: Tensor | None, stream: Stream, gain: Tensor) -> Stream:
    """The stream plus x [R, K] times weight [H, K]; gain [H] is the weight of the norm that comes next."""
    out = stream.like()
    _launch(x, None, (weight, weight), (bias, bias), out.x, (stream.x, gain, out.scaled, out.squares), 0.0, 0)
    return out


def gate(
    stream: Stream, weights: tuple[Tensor, Tensor], biases: tuple[Tensor | None, Tensor | None], eps: float,
    activation: int,
) -> Tensor:  # fmt: skip
    """The activation of norm(x) W_gate times norm(x) W_up: [R, I] for two weights [I, H]."""
    out = stream.x.new_empty(len(stream.x), len(weights[0]))
    _launch(stream.scaled, stream.squares, weights, biases, out, None, eps, activation)
    return out


def logits(stream: Stream, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """norm(x) times weight [V, H] in float32: [R, V]."""
    out = stream.x.new_empty(len(stream.x), len(weight), dtype=torch.float32)
    _launch(stream.scaled, stream.squares, (weight, weight), (bias, bias), out, None, eps, 0)
    return out


def _launch(
    x: Tensor, squares: Tensor | None, weights: tuple[Tensor, Tensor], biases: tuple[Tensor | None, Tensor | None],
    out: Tensor, residual: tuple[Tensor, Tensor, Tensor, Tensor] | None, eps: float, activation: int,
) -> None:  # fmt: skip
    """Launches `multiply_kernel`; what is None is not read."""
    (R, K), C = x.shape, len(weights[0])
    BN = columns_of_tile(C, activation != 0)
    BK = inputs_of_tile(BN * (1 + (activation != 0)), K, x.dtype)
    P = 1 if squares is None else squares.shape[1]
    multiply_kernel[(triton.cdiv(R, ROWS), triton.cdiv(C, BN))](
        x, x if squares is None else squares, *weights, *(x if t is None else t for t in biases),
        *(residual or (x, x))[:2], out, *(residual or (x,) * 4)[2:], R, K, C, P, eps,
        ROWS=ROWS, BN=BN, BK=BK, BP=triton.next_power_of_2(P), EVEN=K % BK == 0,
        NORM=squares is not None, BIAS=biases[0] is not None, GATE=activation, RESIDUAL=residual is not None,
        **kind_of(x), num_warps=BN // 8, num_stages=STAGES,
    )  # fmt: skip


def kind_of(x: Tensor) -> dict[str, Any]:
    """Constants that follow from the numbers' kind: float32 is multiplied as it is; the interpreter widens 16 bits."""
    precision = "ieee" if x.dtype == torch.float32 else "tf32"
    return {"PRECISION": precision, "WIDEN": triton.knobs.runtime.interpret}
