"""Token trees: depth and ancestors of each node, and packing of guesses that spell the same text (SpecInfer).

The nodes of a draft stand in order of depth. `levels` says how many there are at each depth, the same in every row;
`parent` [B, N] may differ by row, and a leading 1 stands for all rows. Entry 0 of a tree is the last committed token
and entry i + 1 is node i. B rows, N nodes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

from specbench.decoding.transfers import constant, upload

Levels = tuple[int, ...]
ROOT, MISSING = -1, -2  # as a parent: the last committed token; the row has no such node


@dataclass(frozen=True)
class Tree:
    """The new tokens of a forward: the last N of the M entries of a tree. A leading 1 stands for all rows."""

    depth: Tensor  # [1 or B, N], distance from entry 0
    sees: Tensor  # [1 or B, N, M], the entries on the path to each new token, itself included


def level_ranges(levels: Levels) -> list[range]:
    """The node indices of each depth."""
    return [range(end - width, end) for end, width in zip(accumulate(levels), levels, strict=True)]


def depths(levels: Levels) -> list[int]:
    """The depth of each node; nodes without a parent node have depth 1."""
    return [depth for depth, width in enumerate(levels, 1) for _ in range(width)]


def levels_of(parent: Sequence[int]) -> Levels:
    """The number of nodes at each depth of a static tree. Raises ValueError if the nodes are not in order of depth."""
    found: list[int] = []
    for node, above in enumerate(parent):
        if not ROOT <= above < node:
            raise ValueError(f"node {node} of a tree has parent {above}: allowed are -1 (the root) and earlier nodes")
        found.append(1 if above == ROOT else found[above] + 1)
    if found != sorted(found):
        raise ValueError(f"the nodes of a tree must stand in order of depth, but their depths are {found}")
    return tuple(found.count(depth) for depth in range(1, max(found, default=0) + 1))


def branching_tree(branching: Sequence[int]) -> tuple[int, ...]:
    """The parent of each node of the tree in which every node of depth d - 1 has branching[d - 1] children."""
    parent: list[int] = []
    above = [ROOT]
    for width in branching:
        begin = len(parent)
        parent += [node for node in above for _ in range(width)]
        above = list(range(begin, len(parent)))
    return tuple(parent)


def static_parent(parent: tuple[int, ...], device: torch.device) -> Tensor:
    """[1, N]: the same parents for every row."""
    return upload([parent], device, torch.long)


def depth_of_entries(levels: Levels, device: torch.device) -> Tensor:
    """[N + 1]: 0 for entry 0, then the depth of each node."""
    return upload([0, *depths(levels)], device)


def tree_of(levels: Levels, parent: Tensor) -> Tree:
    """The `Tree` of all N + 1 entries, for parents [1 or B, N]."""
    N = parent.shape[1]
    own = torch.eye(N + 1, dtype=torch.bool, device=parent.device).expand(len(parent), -1, -1)
    sees = own[:, :1]
    for level in level_ranges(levels):
        a, b = level.start, level.stop
        above = (parent[:, a:b] + 1).clamp(min=0)
        sees = torch.cat([sees, own[:, a + 1 : b + 1] | take_rows(sees, above)], 1)
    return Tree(constant(depth_of_entries)(levels, parent.device)[None], sees)


def static_tree(parent: tuple[int, ...], device: torch.device) -> Tree:
    """The `Tree` of all N + 1 entries, the same in every row."""
    return tree_of(levels_of(parent), static_parent(parent, device))


def newest(parent: tuple[int, ...], count: int, device: torch.device) -> Tree:
    """The `Tree` of the last `count` nodes of a static tree, for a cache that holds the entries before them."""
    whole = constant(static_tree)(parent, device)
    return Tree(whole.depth[:, -count:], whole.sees[:, -count:])


@dataclass(frozen=True)
class Packed:
    """A draft in which guesses that spell the same text share one place: SpecInfer's prefix tree."""

    tokens: Tensor  # [B, M], packed guesses
    tree: Tree  # of M + 1 entries: the last committed token and the packed guesses
    place: Tensor  # [B, N + 1], the packed entry of each entry of the draft


def pack(tokens: Tensor, levels: Levels, parent: Tensor, exists: Tensor, most: int | None = None) -> Packed:
    """Packs guesses tokens [B, N] with parents [1 or B, N] into a prefix tree per row (SpecInfer). exists [B, N] says
    which guesses there are. It is `most` wide or, for None, as wide as the widest row's, which costs a host
    synchronisation."""
    B, N = tokens.shape
    entry = torch.zeros(B, N + 1, dtype=torch.long, device=tokens.device)  # first entry with the same text
    parent_entry = (parent + 1).clamp(min=0).expand(B, N)
    for level in level_ranges(levels):
        a, b = level.start, level.stop
        above, x = entry.gather(1, parent_entry[:, a:b]), tokens[:, a:b]
        same = (above[:, :, None] == above[:, None]) & (x[:, :, None] == x[:, None]) & exists[:, None, a:b]
        entry[:, a + 1 : b + 1] = same.int().argmax(-1) + a + 1
    keeps = (entry == torch.arange(N + 1, device=tokens.device)) & F.pad(exists, (1, 0), value=True)
    rank = keeps.cumsum(1) - 1
    place = rank.gather(1, entry)
    M = int(rank[:, -1].max()) if most is None else min(most, N)
    kept = keeps.int().argsort(dim=1, descending=True, stable=True)[:, : M + 1]  # [B, M + 1], draft entries
    whole = tree_of(levels, parent)
    path = take_rows(whole.sees.expand(B, -1, -1), kept).float()  # [B, M + 1, N + 1]
    sees = path @ F.one_hot(place.clamp(max=M), M + 1).float() > 0
    depth = whole.depth[0][kept]
    guesses = tokens.gather(1, (kept[:, 1:] - 1).clamp(min=0))
    return Packed(guesses, Tree(depth, sees), place)


def take_rows(values: Tensor, index: Tensor) -> Tensor:
    """values [b, M, K] at rows index [1 or b, n] -> [b, n, K]."""
    return values.gather(1, index[..., None].expand(len(values), -1, values.shape[2]))
