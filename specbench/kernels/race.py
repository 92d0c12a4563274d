"""The exponential race of `decoding.sampling.draw` as Triton kernels: hash, log, divide and argmax in one.

The vocabulary is split over many programs, each of which finds the winner of its tokens; a small second kernel finds
the winner of these. Hash, uniforms and quotients are computed in the int64 and float64 arithmetic of
`decoding.noise`, so they have the same bits. Only the float64 logarithm may differ in its last bits from one library to
another, and then only a race whose first two finish within a few parts in 10^16 of each other can end differently.
With many runners T_1 / T_2 is uniform in (0, 1), so that is about one draw in 10^15.

B rows, V vocabulary, S splits. A program works on a tile of R rows and C tokens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 1024  # numbers a program: 126 programs for one row of 128,256
NAN = tl.constexpr(2**63 - 1)  # the key of NaN: it wins, as in argmax
LEAST = tl.constexpr(-(2**63))  # below the key of every token
NO_TOKEN = tl.constexpr(2**31 - 1)


def tile(vocab_size: int) -> tuple[int, int]:
    """R and C, powers of 2."""
    C = min(TILE, triton.next_power_of_2(vocab_size))
    return TILE // C, C


def triton_race(weights: Tensor, bits: Tensor) -> Tensor:
    """Tokens [...] from weights [..., V] and bits [...]: `ops.race`. Raises ValueError if the shapes differ."""
    if weights.shape[:-1] != bits.shape:
        raise ValueError(f"bits have shape {tuple(bits.shape)} and need {tuple(weights.shape[:-1])}, one for each row")
    B, V = bits.numel(), weights.shape[-1]
    R, C = tile(V)
    S = triton.cdiv(V, C)
    keys, runners = bits.new_empty(B, S), bits.new_empty(B, S, dtype=torch.int32)
    tokens = torch.empty_like(bits, memory_format=torch.contiguous_format)
    if B:
        groups = triton.cdiv(B, R)
        race_splits[(groups, S)](weights.contiguous(), bits.contiguous(), keys, runners, B, V, S, R, C)
        race_winner[(groups,)](keys, runners, tokens, B, S, R, triton.next_power_of_2(S))
    return tokens


@triton.jit(do_not_specialize=["B"])
def race_splits(weights, bits, keys, runners, B, V, S, R: tl.constexpr, C: tl.constexpr):
    """The winner of each split: weights [B, V], bits [B] -> keys [B, S] and runners [B, S]."""
    row, token = tile_rows(R), tile_tokens(C)
    there = (row < B) & (token < V)
    weight = tl.load(weights + row * V + token, mask=there, other=0)
    E = exponential(tl.load(bits + row, mask=row < B, other=0), token)
    store_first(keys, runners, row, weight / E, there, B, S, token)


@triton.jit(do_not_specialize=["B"])
def race_winner(keys, runners, tokens, B, S, R: tl.constexpr, SPLITS: tl.constexpr):
    """The winner of all splits: keys [B, S], runners [B, S] -> tokens [B]."""
    row = tile_rows(R)
    _, token = first_of_splits(keys, runners, row, B, S, SPLITS)
    tl.store(tokens + row, token.to(tl.int64), mask=row < B)


@triton.jit
def tile_rows(R: tl.constexpr):
    """The rows of this program, [R, 1] int64."""
    return (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)[:, None]


@triton.jit
def tile_tokens(C: tl.constexpr):
    """The tokens of this program, [1, C]."""
    return (tl.program_id(1) * C + tl.arange(0, C))[None, :]


@triton.jit
def exponential(bits, token):
    """`decoding.noise.exponentials` [R, C] float64: of each token [1, C] from the row's bits [R, 1] int64."""
    x = (bits ^ _mix(_mix(token.to(tl.int64) - 0x61C8864680B583EB))) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 32)) * -0x6B2FB644ECCEEE15
    uniform = (_logical_shift(x, 12).to(tl.float64) + 0.5) * 2.0**-52
    return -tl.log(uniform)


@triton.jit
def store_first(keys, runners, row, speed, there, B, S, token):
    """Stores the winner of a tile in column `program_id(1)` of keys [B, S] and runners [B, S]: speed [R, C] float64 is
    1 / finishing time, `there` [R, C] says which tokens exist."""
    key = tl.where(speed == speed, speed.to(tl.int64, bitcast=True), NAN)  # integers in the order of the speeds
    key, runner = _first(tl.where(there, key, LEAST), token)
    place = row * S + tl.program_id(1)
    tl.store(keys + place, key, mask=row < B)
    tl.store(runners + place, runner, mask=row < B)


@triton.jit
def first_of_splits(keys, runners, row, B, S, SPLITS: tl.constexpr):
    """The winner of each row [R, 1] of keys [B, S] and runners [B, S]: its key [R, 1] and its token [R, 1]."""
    split = tl.arange(0, SPLITS)[None, :]
    there = (row < B) & (split < S)
    key = tl.load(keys + row * S + split, mask=there, other=LEAST)
    return _first(key, tl.load(runners + row * S + split, mask=there, other=NO_TOKEN))


@triton.jit
def _first(key, token):
    """The largest key of each row [R, C], and its token, of equal ones the lowest token: [R, 1] and [R, 1]."""
    best = tl.max(key, 1)[:, None]
    return best, tl.min(tl.where(key == best, token, NO_TOKEN), 1)[:, None]


@triton.jit
def _mix(x):
    """`decoding.noise._mix`."""
    x = (x ^ _logical_shift(x, 30)) * -0x40A7B892E31B1A47
    x = (x ^ _logical_shift(x, 27)) * -0x6B2FB644ECCEEE15
    return x ^ _logical_shift(x, 31)


@triton.jit
def _logical_shift(x, bits: tl.constexpr):
    """`decoding.noise._logical_shift`."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
