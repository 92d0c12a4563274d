"""The softmax of few long rows as Triton kernels. PyTorch gives a row to one block of threads; here it is split.
The argument of exp is rounded to float32, as the logits are: e^-d is off by about d parts in 10^7.

B rows, V vocabulary, S splits. A program works on a tile of R rows and C tokens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specbench.kernels.race import tile, tile_rows, tile_tokens


def triton_softmax(logits: Tensor) -> Tensor:
    """Probabilities [..., V] of logits [..., V]: `ops.softmax`."""
    V = logits.shape[-1]
    R, C = tile(V)
    B, S = logits.numel() // V, triton.cdiv(V, C)
    maxima, sums = logits.new_empty(B, S), logits.new_empty(B, S)
    probabilities = torch.empty_like(logits, memory_format=torch.contiguous_format)
    if B:
        logits, grid = logits.contiguous(), (triton.cdiv(B, R), S)
        softmax_splits[grid](logits, maxima, sums, B, V, S, R, C)
        softmax_rows[grid](logits, maxima, sums, probabilities, B, V, S, R, C, triton.next_power_of_2(S))
    return probabilities


@triton.jit(do_not_specialize=["B"])
def softmax_splits(logits, maxima, sums, B, V, S, R: tl.constexpr, C: tl.constexpr):
    """For each split the maximum [B, S] of its logits, and the sum [B, S] of exp(logit - maximum)."""
    row, token = tile_rows(R), tile_tokens(C)
    x = tl.load(logits + row * V + token, mask=(row < B) & (token < V), other=-float("inf"))
    largest = tl.max(x, 1)[:, None]
    place = row * S + tl.program_id(1)
    tl.store(maxima + place, largest, mask=row < B)
    shift = tl.where(largest == -float("inf"), 0.0, largest)  # else -inf - -inf
    tl.store(sums + place, tl.sum(tl.exp(x - shift), 1)[:, None], mask=row < B)


@triton.jit(do_not_specialize=["B"])
def softmax_rows(
    logits, maxima, sums, probabilities, B, V, S, R: tl.constexpr, C: tl.constexpr, SPLITS: tl.constexpr
):  # fmt: skip
    """exp(logit - maximum) / sum over all splits: probabilities [B, V]."""
    row, token, split = tile_rows(R), tile_tokens(C), tl.arange(0, SPLITS)[None, :]
    measured = (row < B) & (split < S)
    of_split = tl.load(maxima + row * S + split, mask=measured, other=-float("inf"))
    largest = tl.max(of_split, 1)[:, None]
    total = tl.load(sums + row * S + split, mask=measured, other=0.0) * tl.exp(of_split - largest)
    there = (row < B) & (token < V)
    x = tl.load(logits + row * V + token, mask=there, other=0.0)
    tl.store(probabilities + row * V + token, tl.exp(x - largest) / tl.sum(total, 1)[:, None], mask=there)
