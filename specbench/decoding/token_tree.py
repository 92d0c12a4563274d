"""Token trees: depth and ancestors of each node.

Node 0, the root, is the last committed token; nodes 1 .. N are the guesses x_1 .. x_N, in order of depth. Tensors of
guesses have N columns, those of nodes N + 1. `levels` says how many guesses there are at each depth, the same in every
row; `parent` [B, N], the node above each guess, may differ by row, and a leading 1 stands for all rows. B rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from specbench.decoding.transfers import constant, upload

Levels = tuple[int, ...]
ROOT, MISSING = 0, -1  # as a parent: the last committed token; the row has no such guess


@dataclass(frozen=True)
class Tree:
    """The new tokens of a forward: the last n of the M nodes of a tree. A leading 1 stands for all rows."""

    depth: Tensor  # [1 or B, n], distance from the root
    sees: Tensor  # [1 or B, n, M], the nodes on the path to each new token, itself included


def level_slices(levels: Levels) -> list[slice]:
    """The columns of the guesses of each depth."""
    return [slice(end - width, end) for end, width in zip(accumulate(levels), levels, strict=True)]


def depths(levels: Levels) -> list[int]:
    """The depth of each guess; those after the root have depth 1."""
    return [depth for depth, width in enumerate(levels, 1) for _ in range(width)]


def levels_of(parent: Sequence[int]) -> Levels:
    """The number of guesses at each depth of a static tree. Raises ValueError if they are not in order of depth."""
    found = [0]  # depth by node
    for node, above in enumerate(parent, 1):
        if not ROOT <= above < node:
            raise ValueError(f"node {node} of a tree has parent {above}: allowed are 0 (the root) and earlier nodes")
        found.append(found[above] + 1)
    if found != sorted(found):
        raise ValueError(f"the nodes of a tree must stand in order of depth, but their depths are {found[1:]}")
    return tuple(found.count(depth) for depth in range(1, max(found) + 1))


def branching_tree(branching: Sequence[int]) -> tuple[int, ...]:
    """The parent of each guess of the tree in which every node of depth d - 1 has branching[d - 1] children."""
    parent: list[int] = []
    above, last = [ROOT], ROOT
    for width in branching:
        parent += [node for node in above for _ in range(width)]
        above = list(range(last + 1, len(parent) + 1))
        last = len(parent)
    return tuple(parent)


def static_parent(parent: tuple[int, ...], device: torch.device) -> Tensor:
    """[1, N]: the same parents for every row."""
    return upload([parent], device, torch.long)


def depth_of_nodes(levels: Levels, device: torch.device) -> Tensor:
    """[N + 1]: the depth of the root, 0, and of each guess."""
    return upload([0, *depths(levels)], device)


def tree_of(levels: Levels, parent: Tensor) -> Tree:
    """The `Tree` of all N + 1 nodes, for parents [1 or B, N]."""
    N = parent.shape[1]
    own = torch.eye(N + 1, dtype=torch.bool, device=parent.device).expand(len(parent), -1, -1)
    sees = own[:, :1]
    for level in level_slices(levels):
        above = take_rows(sees, parent[:, level].clamp(min=ROOT))
        sees = torch.cat([sees, own[:, 1:][:, level] | above], 1)
    return Tree(constant(depth_of_nodes)(levels, parent.device)[None], sees)


def static_tree(parent: tuple[int, ...], device: torch.device) -> Tree:
    """The `Tree` of all N + 1 nodes, the same in every row."""
    return tree_of(levels_of(parent), static_parent(parent, device))


def newest(parent: tuple[int, ...], count: int, device: torch.device) -> Tree:
    """The `Tree` of the last `count` nodes of a static tree, for a cache that holds the nodes before them."""
    whole = constant(static_tree)(parent, device)
    return Tree(whole.depth[:, -count:], whole.sees[:, -count:])


def take_rows(values: Tensor, index: Tensor) -> Tensor:
    """values [b, M, K] at rows index [1 or b, n] -> [b, n, K]."""
    return values.gather(1, index[..., None].expand(len(values), -1, values.shape[2]))
