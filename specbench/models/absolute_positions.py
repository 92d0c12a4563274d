"""Positions of an encoder-decoder's new tokens, of which every row and every tree has its own.

The decoders of transformers take no positions: they count them from the length of the cache, which is one number for
all rows. Inside `Positions.at` the two places that use them, the embedding of positions (BART, Pegasus, Marian,
M2M-100) and the bias by distance (T5), get those of the forward. Outside of it the module is as transformers made it. b
rows, N new tokens, M entries of a tree, T columns, H hidden.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specbench.decoding.token_tree import Tree
from specbench.models.attention_mask import positions_of_columns
from specbench.settings import UNLIMITED_CONTEXT


class Positions:
    """The parts of a decoder that depend on positions."""

    def __init__(self, decoder: nn.Module):
        embedding = getattr(decoder, "embed_positions", None)
        self.embedding: Any = embedding if _embeds(embedding) else None
        self.biased = [child for child in decoder.modules() if _has_bias(child)]

    @property
    def known(self) -> bool:
        """Whether the decoder has positions of exactly one of the two kinds."""
        return (self.embedding is None) == bool(self.biased)

    @property
    def no_position(self) -> int | None:
        """A token that has no position of its own when transformers reads it (M2M-100's padding), or None."""
        return int(self.embedding.padding_idx) if _skips_padding(self.embedding) else None

    @property
    def most(self) -> int:
        """The number of positions that there is an embedding for."""
        table, first = _table(self.embedding)
        return UNLIMITED_CONTEXT if table is None else len(table) - first

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


def _embeds(embedding: Any) -> bool:
    """Whether this is an embedding of positions that can be given: learned, in a table, or computed from them."""
    if isinstance(embedding, nn.Embedding) or _skips_padding(embedding):
        return True
    return isinstance(embedding, nn.Module) and "position_ids" in inspect.signature(embedding.forward).parameters


def _skips_padding(embedding: Any) -> bool:
    """Whether positions are counted in fairseq's way: from padding_idx + 1 on, and padding has that of padding_idx."""
    return hasattr(embedding, "create_position_ids_from_input_ids") or hasattr(embedding, "make_positions")


def _has_bias(child: nn.Module) -> bool:
    """Whether this is self-attention with a bias by distance of its own; the other layers use that of the first."""
    return bool(getattr(child, "has_relative_attention_bias", False)) and hasattr(child, "compute_bias")


def _embedded(embedding: Any, positions: Tensor, *given: Any, **others: Any) -> Tensor:
    """[b, N, H]: the embedding of positions [b, N], whatever the decoder asks for. Some skip the first rows."""
    table, first = _table(embedding)
    if table is None:
        inputs = given[0].reshape(1, -1, given[0].shape[-1])  # [1, b * N, H]: it takes one position for all rows
        computed: Tensor = type(embedding).forward(embedding, inputs, 0, positions.reshape(-1, 1))
        return computed.reshape(*positions.shape, -1)
    rows = positions + first
    if _skips_padding(embedding):
        rows = torch.where(given[0] == embedding.padding_idx, embedding.padding_idx, rows)
    return F.embedding(rows, table)


def _table(embedding: Any) -> tuple[Tensor | None, int]:
    """The table [rows, H] of an embedding and the row of position 0; no table if each position is computed."""
    if _skips_padding(embedding):
        return embedding.weight if isinstance(embedding, nn.Embedding) else embedding.weights, embedding.padding_idx + 1
    return getattr(embedding, "weight", None), getattr(embedding, "offset", 0)


def _bias(attention: Any, distance: Tensor, *given: Any, **others: Any) -> Tensor:
    """[b, heads, N, T]: the bias of each new token at each column, by their distance [b, N, T]."""
    known = {
        "bidirectional": False,
        "num_buckets": attention.relative_attention_num_buckets,
        "max_distance": attention.relative_attention_max_distance,
    }
    taken = inspect.signature(attention._relative_position_bucket).parameters  # UMT5's takes the distance only
    buckets = attention._relative_position_bucket(distance, **{k: v for k, v in known.items() if k in taken})
    found: Tensor = attention.relative_attention_bias(buckets).permute(0, 3, 1, 2)
    return found


def _distances(positions: Tensor, root: Tensor, visible: int, tree: Tree | None) -> Tensor:
    """[b, N, T]: the position of each column less that of each new token, positions [b, N]; only columns that are seen
    count. root [b] is the column of a tree's entry 0."""
    return positions_of_columns(root, visible, tree)[:, None] - positions[:, :, None]
