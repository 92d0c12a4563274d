"""Algorithm 1's verdict on a chain, `decoding.verify.speculative_sampling`, as Triton kernels.

Every program decides n of its rows anew from the N tests, which is less work than a kernel of its own, and then runs
two races with the same exponentials over its tokens: one for the residual max(0, p_{n+1} - q_{n+1}), one for p_{n+1},
which counts where no residual is left. A second kernel finds the winners over all splits and writes the verdict.

B rows, N guesses, V vocabulary, S splits. A program works on a tile of R rows and C tokens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specbench.kernels.race import NAN, exponential, first_of_splits, store_first, tile, tile_rows, tile_tokens


def triton_verdict(
    p: Tensor, q: Tensor | None, guesses: Tensor, limits: Tensor, bits: Tensor, count: Tensor
) -> tuple[Tensor, Tensor]:
    """Tokens [B, N+1] and n [B] from p [B, N+1, V], q [B, N, V] or None, guesses [B, N], limits [B, N], bits [B, N+1]
    and count [B]: `ops.chain_verdict`. Raises ValueError if the shapes differ."""
    (B, N), V = guesses.shape, p.shape[-1]
    shapes = [tuple(given.shape) for given in (p, p[:, :-1] if q is None else q, limits, bits, count)]
    needed = [(B, N + 1, V), (B, N, V), (B, N), (B, N + 1), (B,)]
    if shapes != needed:
        raise ValueError(f"p, q, limits, bits and count have shapes {shapes} and need {needed}")
    R, C = tile(V)
    S, places = triton.cdiv(V, C), triton.next_power_of_2(N + 1)
    tokens, n = guesses.new_empty(B, N + 1), torch.empty_like(count)
    keys, runners = bits.new_empty(2, B, S), bits.new_empty(2, B, S, dtype=torch.int32)
    if B:
        groups = triton.cdiv(B, R)
        distributions = (p.contiguous(), p if q is None else q.contiguous())
        rows = (guesses.contiguous(), limits.contiguous(), bits.contiguous(), count.contiguous())
        verdict_splits[(groups, S)](*distributions, *rows, n, keys, runners, B, N, V, S, q is None, R, C, places)
        splits = triton.next_power_of_2(S)
        verdict_winner[(groups,)](rows[0], n, *keys, *runners, tokens, B, N, S, R, splits, places)
    return tokens, n


@triton.jit(do_not_specialize=["B", "N"])
def verdict_splits(
    p, q, guesses, limits, bits, count, accepted, keys, runners, B, N, V, S,
    POINT: tl.constexpr, R: tl.constexpr, C: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """n [B], and the winner of each split: keys [2, B, S] and runners [2, B, S], of the residual first, then of p."""
    row, token = tile_rows(R), tile_tokens(C)
    gamma = tl.load(count + row, mask=row < B, other=0)
    n = _leading(p, q, guesses, limits, row, gamma, B, N, V, POINT, PLACES)
    if tl.program_id(1) == 0:
        tl.store(accepted + row, n, mask=row < B)
    there = (row < B) & (token < V)
    p_next = tl.load(p + (row * (N + 1) + n) * V + token, mask=there, other=0)
    if POINT:
        q_next = (token == tl.load(guesses + row * N + n, mask=n < gamma, other=-1)).to(p_next.dtype)
    else:
        q_next = tl.load(q + (row * N + n) * V + token, mask=there & (n < gamma), other=0)
    residual = p_next - q_next
    residual = tl.where(residual < 0, 0, residual)  # NaN stays
    E = exponential(tl.load(bits + row * (N + 1) + n, mask=row < B, other=0), token)
    store_first(keys, runners, row, residual / E, there, B, S, token)
    store_first(keys + B * S, runners + B * S, row, p_next / E, there, B, S, token)


@triton.jit
def _leading(
    p, q, guesses, limits, row, gamma, B, N, V, POINT: tl.constexpr, PLACES: tl.constexpr
):  # fmt: skip
    """n of each row [R, 1]: the place of the first guess that is rejected or does not exist. gamma [R, 1]."""
    place = tl.arange(0, PLACES)[None, :]  # more than N of them, so that one is always rejected
    there = (row < B) & (place < N) & (place < gamma)
    x = tl.load(guesses + row * N + place, mask=there, other=0)
    limit = tl.load(limits + row * N + place, mask=there, other=0)
    if not POINT:
        limit = limit * tl.load(q + (row * N + place) * V + x, mask=there, other=0)
    accept = limit < tl.load(p + (row * (N + 1) + place) * V + x, mask=there, other=0)
    return tl.min(tl.where(accept & there, PLACES, place), 1)[:, None]


@triton.jit(do_not_specialize=["B", "N"])
def verdict_winner(
    guesses, accepted, residual_keys, p_keys, residual_runners, p_runners, tokens, B, N, S,
    R: tl.constexpr, SPLITS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """The tokens [B, N+1]: the guesses [B, N], with t in place of x_{n+1}."""
    row, place = tile_rows(R), tl.arange(0, PLACES)[None, :]
    key, recovered = first_of_splits(residual_keys, residual_runners, row, B, S, SPLITS)
    _, instead = first_of_splits(p_keys, p_runners, row, B, S, SPLITS)
    # A key above 0 means that a residual is; NaN anywhere in it leaves no residual, since its sum is not above 0.
    t = tl.where((key > 0) & (key < NAN), recovered, instead)
    n = tl.load(accepted + row, mask=row < B, other=0)
    x = tl.load(guesses + row * N + place, mask=(row < B) & (place < N), other=0)
    tl.store(tokens + row * (N + 1) + place, tl.where(place == n, t, x), mask=(row < B) & (place <= N))
