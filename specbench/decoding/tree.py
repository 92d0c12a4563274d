"""Token trees: who sees whom, how guesses that say the same share a place, and which path was taken.

A draft's nodes stand in order of depth. Entry 0 of a tree is the last committed token and entry
i + 1 is node i of the draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from specbench.decoding.noise import constant

if TYPE_CHECKING:
    from specbench.decoding.state import Draft, Verdict


@dataclass(frozen=True)
class Tree:
    """New tokens of a forward: the last N of the M entries of a tree. A leading 1 stands for all rows."""

    depth: Tensor  # [1 or B, N], distance from entry 0
    sees: Tensor  # [1 or B, N, M], the entries on the path to each new token, itself included


def depths(parent: Sequence[int]) -> list[int]:
    """Of each node, from 1."""
    found: list[int] = []
    for above in parent:
        found.append(1 if above < 0 else found[above] + 1)
    return found


def levels(parent: Sequence[int]) -> list[range]:
    """The nodes of each depth, which stand behind one another."""
    found = depths(parent)
    ends = [found.index(depth) for depth in range(1, max(found, default=0) + 1)]
    return [range(begin, end) for begin, end in pairwise([*ends, len(parent)])]


def parents(parent: tuple[int, ...], device: torch.device) -> Tensor:
    """[N], as entries."""
    return torch.tensor(parent, dtype=torch.long, device=device) + 1


def depth_of_count(parent: tuple[int, ...], device: torch.device) -> Tensor:
    """[N + 1], the depth of the first 0, 1, ..., N nodes together."""
    return torch.tensor([0, *depths(parent)], device=device)


def siblings(parent: Sequence[int]) -> list[int]:
    """Of each node, how many of its depth stand before it."""
    return [i - level.start for level in levels(parent) for i in level]


def branching_tree(branching: Sequence[int]) -> tuple[int, ...]:
    """The tree in which every node of depth d - 1 has branching[d - 1] children."""
    parent, above = [], [-1]
    for width in branching:
        begin = len(parent)
        parent += [node for node in above for _ in range(width)]
        above = list(range(begin, len(parent)))
    return tuple(parent)


def tree_of(parent: tuple[int, ...], device: torch.device) -> Tree:
    """All entries of a tree that every row has."""
    sees = torch.eye(len(parent) + 1, dtype=torch.bool)
    for node, above in enumerate(parent):
        sees[node + 1] |= sees[above + 1]
    depth = torch.tensor([[0, *depths(parent)]])
    return Tree(depth.to(device), sees[None].to(device))


def newest(parent: tuple[int, ...], count: int, device: torch.device) -> Tree:
    """The last `count` nodes of a tree, where a cache holds the entries before them."""
    whole = constant(tree_of)(parent, device)
    return Tree(whole.depth[:, -count:], whole.sees[:, -count:])


@dataclass(frozen=True)
class Packed:
    """A draft in which guesses that spell the same text share one place (SpecInfer's prefix tree)."""

    tokens: Tensor  # [B, M]
    tree: Tree  # with its entry 0
    place: Tensor  # [B, N + 1], the entry that each entry of the draft has become


def pack(tokens: Tensor, parent: tuple[int, ...], count: Tensor) -> Packed:
    """Packs guesses [B, N] of which the first `count` [B] are there. Rows share nothing: each has a
    tree of its own, as wide as the widest. Costs a host synchronisation."""
    B, N = tokens.shape
    entry = torch.zeros(B, N + 1, dtype=torch.long, device=tokens.device)  # first entry with the same text
    parent_entry = constant(parents)(parent, tokens.device)
    for level in levels(parent):
        a, b = level.start, level.stop
        above, x = entry[:, parent_entry[a:b]], tokens[:, a:b]
        same = (above[:, :, None] == above[:, None]) & (x[:, :, None] == x[:, None])
        entry[:, a + 1 : b + 1] = same.int().argmax(-1) + a + 1
    entries = torch.arange(N + 1, device=tokens.device)
    keeps = (entry == entries) & (entries <= count[:, None])
    rank = keeps.cumsum(1) - 1
    place = rank.gather(1, entry)
    M = int(rank[:, -1].max())
    kept = keeps.int().argsort(dim=1, descending=True, stable=True)[:, : M + 1]  # [B, M + 1], draft entries
    whole = constant(tree_of)(parent, tokens.device)
    path = whole.sees[0][kept].float()  # [B, M + 1, N + 1]
    sees = path @ F.one_hot(place.clamp(max=M), M + 1).float() > 0
    depth = whole.depth[0][kept]
    guesses = tokens.gather(1, (kept[:, 1:] - 1).clamp(min=0))
    return Packed(guesses, Tree(depth, sees), place)


def along(draft: Draft, verdict: Verdict) -> tuple[Tensor, Tensor, Tensor]:
    """The path that was taken through a tree: the entry before each step [B, D + 1], the first guess that
    was there to be tried, as a node [B, D], and how many steps had a guess [B]."""
    path, n = verdict.path, verdict.accepted
    first = constant(first_children)(draft.parent, path.device)  # [N + 1]
    entries = F.pad(path + 1, (1, 0))
    steps = torch.arange(entries.shape[1], device=path.device)
    entries = torch.where(steps <= n[:, None], entries, entries.gather(1, n[:, None]))
    child = first[entries]
    there = (child >= 0) & (child < draft.count[:, None])
    return entries, child[:, :-1].clamp(min=0), n + there[:, -1].long()


def first_children(parent: tuple[int, ...], device: torch.device) -> Tensor:
    """[N + 1]: the first child of each entry, as a node of the draft; -1 is none."""
    first = [-1] * (len(parent) + 1)
    for node in reversed(range(len(parent))):
        first[parent[node] + 1] = node
    return torch.tensor(first, device=device)
