"""Attention of a few new tokens over cached keys and values, in Triton (split-KV, "flash-decoding").

Keys and values are read where the cache wrote them: through a block table, without a copy for grouped query heads. How
many columns a row has is read on the device. A row's columns are divided among S programs. The last one to finish
merges their partial results, in the order of the columns. S follows from shapes alone, so one CUDA graph serves every
length, and programs beyond a row's columns return at once. Sums are in float32.

A program has PART columns, by their positions alone, and a tile has ROWS query rows. What a row does not see adds exact
zeros. So its result has the same bits beside any others, in any cache.

b rows, N new tokens, M entries of a tree, H query heads, K key heads, G = H / K, D head size (E of values), S splits.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

PART = 256  # columns of a split
ROWS = 16  # of a tile; a row is one query head of one new token
MERGED = tl.constexpr(32)  # weights of splits that are read at a time
VARY = ["N", "M", "sees_row", "sees_token", "depth_row", "splits", "per"]  # one kernel serves all values
LOG2E = 1.4426950408889634


@triton.jit
def share(
    tile, first, N, M, size, per, BM: tl.constexpr, BN: tl.constexpr, G: tl.constexpr, TREE: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """What query rows see: their first tile of BN columns, the end of the last, and their splits: first, how many."""
    end = tl.minimum(first + tl.minimum(((tile + 1) * BM - 1) // G + 1, N), size)
    end = tl.maximum(end, 1)  # a token before column 0 stands for the one there
    begin = first * 0
    if WINDOW:
        place = first + N - M if TREE else first + tile * BM // G  # the least position of the rows, or less
        begin = tl.maximum(place - WINDOW + 1, 0) // BN
    return begin, end, begin // per, tl.cdiv(tl.cdiv(end, BN), per) - begin // per


@triton.jit
def stored_at(
    table, row, table_row, column, there, block, start, block_stride, head, head_stride, column_stride,
    ONE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Where a row's columns of a key head begin in the tensor at `start`."""
    if ONE_BLOCK:
        number, within = tl.load(table + row * table_row).to(tl.int64) + column * 0, column
    else:
        number = tl.load(table + row * table_row + column // block, mask=there, other=0).to(tl.int64)
        within = column % block
    return start + number * block_stride + head * head_stride + within * column_stride


@triton.jit
def sees_columns(
    column, there, own, place, real, n, row, first, sees, sees_row, sees_token, N, M, TREE: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """[BM, BN]: which columns each query row sees, of a token in column own [BM], at position place [BM]."""
    seen = (column[None, :] <= own[:, None]) & there[None, :]
    if TREE:
        entry = column - (first + N - M)
        asked = real[:, None] & (entry >= 0)[None, :] & (entry < M)[None, :]
        at_sees = sees + row * sees_row + n[:, None] * sees_token + entry[None, :]
        seen = seen & ((entry < 0)[None, :] | (tl.load(at_sees, mask=asked, other=0) != 0))
    if WINDOW:
        seen = seen & (column[None, :] > place[:, None] - WINDOW)
    return seen


@triton.jit
def merge(partial, weight, out, inside, real, made, E: tl.constexpr):
    """Merges the partial results of a tile of query rows, at `partial` and `weight` of split 0, in the order of the
    splits. They are read from where all multiprocessors see them."""
    split = tl.arange(0, MERGED)
    most = tl.full(real.shape, float("-inf"), tl.float32)  # [BM]
    for i in range(0, made, MERGED):
        there = real[:, None] & (i + split < made)[None, :]
        at = weight[:, None] + i + split[None, :]
        most = tl.maximum(most, tl.max(tl.load(at, mask=there, other=float("-inf"), cache_modifier=".cg"), 1))
    most = tl.where(most == float("-inf"), 0.0, most)
    sums = tl.zeros(inside.shape, tl.float32)
    total = tl.zeros(most.shape, tl.float32)
    for i in tl.range(0, made, num_stages=4):
        share_of = tl.exp2(tl.load(weight + i, mask=real, other=float("-inf"), cache_modifier=".cg") - most)
        total += share_of
        sums += share_of[:, None] * tl.load(partial + i * E, mask=inside, other=0.0, cache_modifier=".cg")
    total = tl.where(total > 0, total, 1.0)  # of rows that are not real
    tl.store(out, (sums / total[:, None]).to(out.dtype.element_ty), mask=inside)


@triton.jit
def add_tile(most, total, sums, score, seen, v, PRECISION: tl.constexpr, WIDEN: tl.constexpr):
    """Adds a tile of columns to what rows have read: the largest score [BM], and relative to it the sums of weights
    [BM] and of weighted values [BM, BE]. score [BM, BN] in base 2, of which seen [BM, BN] count; v [BN, BE]."""
    score = tl.where(seen, score, float("-inf"))
    highest = tl.maximum(most, tl.max(score, 1))
    level = tl.where(highest == float("-inf"), 0.0, highest)  # a row that sees none of the columns so far
    shrink, p = tl.exp2(most - level), tl.exp2(score - level[:, None])
    total = total * shrink + tl.sum(p, 1)
    p = p.to(v.dtype)
    if WIDEN:
        p, v = p.to(tl.float32), v.to(tl.float32)
    return highest, total, sums * shrink[:, None] + tl.dot(p, v, input_precision=PRECISION)


@triton.jit
def store(
    mean, power, out, partial, weight, counter, place, e, real, split, splits, made, E: tl.constexpr
):  # fmt: skip
    """Stores the results mean [BM, BE] of a split with the logarithms of their weights power [BM]; the last program to
    finish merges those of all. place [BM] is where each query row stands in [b, N, H]."""
    inside = real[:, None] & (e < E)[None, :]
    at_out = out + place[:, None] * E + e[None, :]
    if splits == 1:
        tl.store(at_out, mean.to(out.dtype.element_ty), mask=inside)
    else:
        at, at_weight = partial + (place * splits)[:, None] * E + e[None, :], weight + place * splits
        tl.store(at + split * E, mean, mask=inside, cache_modifier=".cg")
        tl.store(at_weight + split, power, mask=real, cache_modifier=".cg")
        tl.debug_barrier()  # all of this program is stored before it counts itself
        if tl.atomic_add(counter, 1) == made - 1:
            merge(at, at_weight, at_out, inside, real, made, E)
            tl.store(counter, 0)


@triton.jit(do_not_specialize=VARY)
def attend_split(
    q, keys, values, table, first, sees, depth, out, partial, weight, finished,
    q_row, q_head, q_token, k_block, k_head, k_column, v_block, v_head, v_column,
    table_row, sees_row, sees_token, depth_row, N, M, size, block, splits, per, scale,
    G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    BE: tl.constexpr, TREE: tl.constexpr, WINDOW: tl.constexpr, ONE_BLOCK: tl.constexpr, PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """Attention of BM query rows of one key head over one split of the columns. A query row is one query head of one
    new token. With one split the result goes to out [b, N, H, E], else to partial [b, N, H, S, E] with the logarithm of
    its weight in weight [b, N, H, S], in base 2, which the last program merges. In finished [b, tiles, K], all 0
    before and after, programs count themselves."""
    split, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    tiles = tl.cdiv(N * G, BM)
    row, tile = tl.program_id(2) // tiles, tl.program_id(2) % tiles
    start = tl.load(first + row)
    begin, end, skipped, made = share(tile, start, N, M, size, per, BM, BN, G, TREE, WINDOW)
    begin = tl.maximum(begin, (skipped + split) * per)
    stop = tl.minimum((skipped + split + 1) * per, tl.cdiv(end, BN))
    if begin >= stop:
        return

    r = tile * BM + tl.arange(0, BM)
    n, query_head, real = r // G, head * G + r % G, r < N * G
    d, e = tl.arange(0, BD), tl.arange(0, BE)
    at_q = q + row.to(tl.int64) * q_row + n * q_token + query_head * q_head
    x = tl.load(at_q[:, None] + d[None, :], mask=real[:, None] & (d < D)[None, :], other=0.0)  # [BM, BD]
    x = x.to(tl.float32) if WIDEN else x
    own = tl.maximum(start + n, 0)  # [BM], column of each query row's token
    place = own
    if TREE and WINDOW:
        place = start + N - M + tl.load(depth + row * depth_row + n, mask=real, other=0)

    most = tl.full([BM], float("-inf"), tl.float32)
    total, sums = tl.zeros([BM], tl.float32), tl.zeros([BM, BE], tl.float32)
    for i in range(begin, stop):
        column = i * BN + tl.arange(0, BN)
        there = column < end
        at_k = stored_at(table, row, table_row, column, there, block, keys, k_block, head, k_head, k_column, ONE_BLOCK)
        k = tl.load(at_k[None, :] + d[:, None], mask=there[None, :] & (d < D)[:, None], other=0.0)  # [BD, BN]
        k = k.to(tl.float32) if WIDEN else k
        score = tl.dot(x, k, input_precision=PRECISION) * scale  # [BM, BN]
        seen = sees_columns(
            column, there, own, place, real, n, row, start, sees, sees_row, sees_token, N, M, TREE, WINDOW
        )
        at_v = stored_at(
            table, row, table_row, column, there, block, values, v_block, head, v_head, v_column, ONE_BLOCK
        )
        v = tl.load(at_v[:, None] + e[None, :], mask=there[:, None] & (e < E)[None, :], other=0.0)  # [BN, BE]
        most, total, sums = add_tile(most, total, sums, score, seen, v, PRECISION, WIDEN)

    total = tl.where(most == float("-inf"), 1.0, total)  # a row that sees nothing has no weight
    place_of = (row.to(tl.int64) * N + n) * (heads * G) + query_head  # [BM], in [b, N, H]
    counter = finished + tl.program_id(2) * heads + head
    store(
        sums / total[:, None], most + tl.log2(total), out, partial, weight, counter, place_of, e, real, split, splits,
        made, E,
    )  # fmt: skip


def tile_shape(widest: int, dtype: torch.dtype) -> tuple[int, int]:
    """Columns of a tile, and warps, for heads of `widest` numbers: no kernel spills (experiments/gpu/registers.py)."""
    if dtype == torch.float32:
        return 16, 8
    return 32 if widest > 128 else 64, 4


@cache
def counters(device: torch.device, count: int) -> Tensor:
    """Zeros [count], which every call leaves 0. Calls follow each other."""
    return torch.zeros(count, dtype=torch.int32, device=device)


def attend(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, first: Tensor, sees: Tensor | None, depth: Tensor | None,
    scale: float, window: int | None,
) -> Tensor:  # fmt: skip
    """Attention [b, N, H, E] of queries [b, H, N, D] over blocks of keys [blocks, K, block size, D] and values
    [blocks, K, block size, E], of which the last dimension is contiguous. Scores are multiplied by `scale`.

    table [b, width] holds the numbers of the blocks in which row i has its columns. New token n of row i has column
    first[i] + n, or 0 if that is negative, and sees every column up to its own. Of the M entries of a tree, of which
    the new tokens are the last N, it sees those that sees [1 or b, N, M] bool names. With a sliding `window` it sees
    only so many positions, its own included; in a tree, positions follow from depth [1 or b, N], the distance from
    entry 0.
    """
    (b, H, N, D), (_, K, block, E), width = q.shape, values.shape, table.shape[1]
    G, tree = H // K, sees is not None
    BN, warps = tile_shape(max(D, E), q.dtype)
    tiles = triton.cdiv(N * G, ROWS)
    S = triton.cdiv(width * block, PART)
    per = PART // BN  # tiles of columns of a split
    out = torch.empty(b, N, H, E, dtype=q.dtype, device=q.device)
    partial = torch.empty((b, N, H, S, E) if S > 1 else (1,), dtype=torch.float32, device=q.device)
    weight = torch.empty((b, N, H, S) if S > 1 else (1,), dtype=torch.float32, device=q.device)
    path = first if sees is None else sees.view(torch.uint8).expand(b, -1, -1)
    place = first if depth is None else depth.expand(b, -1)
    M = N if sees is None else sees.shape[2]
    strides = (*q.stride()[:3], *keys.stride()[:3], *values.stride()[:3], table.stride(0))
    strides = (*strides, *(path.stride()[:2] if tree else (0, 0)), place.stride(0))
    finished = counters(q.device, triton.next_power_of_2(b * tiles * K))
    attend_split[(S, K, b * tiles)](
        q, keys, values, table, first, path, place, out, partial, weight, finished,
        *strides, N, M, width * block, block, S, per, scale * LOG2E,
        G=G, D=D, E=E, BM=ROWS, BN=BN, BD=triton.next_power_of_2(max(D, 16)), BE=triton.next_power_of_2(max(E, 16)),
        TREE=tree, WINDOW=window or 0, ONE_BLOCK=width == 1,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", WIDEN=triton.knobs.runtime.interpret,
        num_warps=warps, num_stages=2,
    )  # fmt: skip
    return out
