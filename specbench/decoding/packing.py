"""Packing of guesses that spell the same text (SpecInfer): the target reads them once. Names: `token_tree`."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from specbench.decoding.token_tree import ROOT, Levels, Tree, level_slices, take_rows, tree_of


@dataclass(frozen=True)
class Packed:
    """A draft in which guesses that spell the same text share one place: SpecInfer's prefix tree."""

    tokens: Tensor  # [B, M], packed guesses
    tree: Tree  # of M + 1 nodes: the root and the packed guesses
    place: Tensor  # [B, N + 1], the packed node of each node of the draft


def pack(tokens: Tensor, levels: Levels, parent: Tensor, exists: Tensor, most: int | None = None) -> Packed:
    """Packs guesses tokens [B, N] with parents [1 or B, N] into a prefix tree per row (SpecInfer). exists [B, N] says
    which there are. It is `most` wide; None, which costs a host synchronisation, is as wide as the widest row's."""
    B, N = tokens.shape
    nodes = torch.arange(N + 1, device=tokens.device)
    first = torch.zeros(B, N + 1, dtype=torch.long, device=tokens.device)  # by node, the first one of the same text
    parent_node = parent.clamp(min=ROOT).expand(B, N)
    for level in level_slices(levels):
        above, x = first.gather(1, parent_node[:, level]), tokens[:, level]
        same = (above[:, :, None] == above[:, None]) & (x[:, :, None] == x[:, None]) & exists[:, None, level]
        first[:, 1:][:, level] = nodes[1:][level][same.int().argmax(-1)]
    keeps = (first == nodes) & F.pad(exists, (1, 0), value=True)
    rank = keeps.cumsum(1) - 1
    place = rank.gather(1, first)
    M = int(rank[:, -1].max()) if most is None else min(most, N)
    kept = keeps.int().argsort(dim=1, descending=True, stable=True)[:, : M + 1]  # [B, M + 1], nodes of the draft
    whole = tree_of(levels, parent)
    path = take_rows(whole.sees.expand(B, -1, -1), kept).float()  # [B, M + 1, N + 1]
    sees = path @ F.one_hot(place.clamp(max=M), M + 1).float() > 0
    depth = whole.depth[0][kept]
    guesses = F.pad(tokens, (1, 0)).gather(1, kept)[:, 1:]
    return Packed(guesses, Tree(depth, sees), place)
