"""Positions of an encoder-decoder's new tokens, of which every row and every tree has its own.

The decoders of transformers take no positions: they count them from the length of the cache, which is one number for
all rows. Inside `Positions.at` the two places that use them, the embedding of positions (BART, Pegasus, Marian) and the
bias by distance (T5), get those of the forward. Outside of it the module is as transformers made it. b rows, N new
tokens, M entries of a tree, T columns, H hidden.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specbench.decoding.token_tree import Tree


class Positions:
    """The parts of a decoder that depend on positions."""

    def __init__(self, decoder: nn.Module):
        embedding = getattr(decoder, "embed_positions", None)
        self.embedding = embedding if isinstance(embedding, nn.Embedding) else None
        self.biased = [child for child in decoder.modules() if _has_bias(child)]

    @property
    def known(self) -> bool:
        """Whether the decoder has positions of exactly one of the two kinds."""
        return (self.embedding is None) == bool(self.biased)

    @contextmanager
    def at(self, positions: Tensor, root: Tensor, visible: int, tree: Tree | None) -> Iterator[None]:
        """Inside this context the decoder's new tokens stand at positions [b, N] and see `visible` columns; entry 0 of
        their tree, if they are one, is in column root [b]."""
        if self.embedding is not None:
            changed: list[nn.Module] = [self.embedding]
            name, value = "forward", partial(_embedded, self.embedding, positions)
            vars(self.embedding)[name] = value
        else:
            changed, name = self.biased, "compute_bias"
            distance = _distances(positions, root, visible, tree)
            for attention in changed:
                vars(attention)[name] = partial(_bias, attention, distance)
        try:
            yield
        finally:
            for child in changed:
                del vars(child)[name]


def _has_bias(child: nn.Module) -> bool:
    """Whether this is self-attention with a bias by distance of its own; the other layers use that of the first."""
    return bool(getattr(child, "has_relative_attention_bias", False)) and hasattr(child, "compute_bias")


def _embedded(embedding: nn.Embedding, positions: Tensor, *given: Any, **others: Any) -> Tensor:
    """[b, N, H]: the embedding of positions [b, N], whatever the decoder asks for. Some skip the first rows."""
    return F.embedding(positions + getattr(embedding, "offset", 0), embedding.weight)


def _bias(attention: Any, distance: Tensor, *given: Any, **others: Any) -> Tensor:
    """[b, heads, N, T]: the bias of each new token at each column, by their distance [b, N, T]."""
    buckets = attention._relative_position_bucket(
        distance,
        bidirectional=False,
        num_buckets=attention.relative_attention_num_buckets,
        max_distance=attention.relative_attention_max_distance,
    )
    found: Tensor = attention.relative_attention_bias(buckets).permute(0, 3, 1, 2)
    return found


def _distances(positions: Tensor, root: Tensor, visible: int, tree: Tree | None) -> Tensor:
    """[b, N, T]: the position of each column less that of each new token, positions [b, N]. The column of a tree's
    entry stands at the entry's depth behind the root's column, root [b]; only columns that are seen count."""
    columns = torch.arange(visible, device=positions.device)
    if tree is None:
        return columns - positions[:, :, None]
    (b, N), M = positions.shape, tree.sees.shape[2]
    depth = tree.sees.long().cumsum(-1) - 1  # [1 or b, N, M], of the entries on the path to each new token
    relative = columns - root[:, None]  # [b, T]; the column of entry 0 is 0
    entry = relative.clamp(0, M - 1)[:, None].expand(b, N, visible)
    inside = root[:, None, None] + depth.expand(b, N, M).gather(2, entry)
    return torch.where((relative >= 0)[:, None], inside, columns) - positions[:, :, None]
