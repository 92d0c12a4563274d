"""How decoders of transformers that take no positions are given one for each new token of each row.

Most causal modules take positions as an argument. The others count them from the length of the cache, one number for
all rows: learned and sinusoidal embeddings (BART, Pegasus, Marian, M2M-100), and T5's bias by distance. Inside
`Positions.at` these are made of the positions of the forward; outside of it the module is as transformers made it.
b rows, N new tokens, T columns, H hidden, V vocabulary.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specbench.models.attention_mask import TokenPlaces
from specbench.settings import UNLIMITED_CONTEXT


class Positions:
    """What is exchanged in a decoder for the positions of a forward."""

    def __init__(self, decoder: Any):
        embedding = dict(decoder.named_children()).get("embed_positions")
        self.embedding: Any = embedding if _embeds(embedding) else None
        # T5's first layer, whose bias the others use.
        self.biased = [part for part in decoder.modules() if vars(part).get("has_relative_attention_bias")]

    @property
    def known(self) -> bool:
        """Whether the decoder makes its positions in one of these ways."""
        return (self.embedding is not None) != bool(self.biased)

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
    def at(self, places: TokenPlaces) -> Iterator[None]:
        """Inside this context the decoder's new tokens stand there."""
        changed: list[tuple[Any, str, Callable[..., Tensor]]] = []
        if self.embedding is not None:
            changed.append((self.embedding, "forward", partial(_embedded, self.embedding, places.positions)))
        if self.biased:
            distance = places.of_columns[:, None] - places.positions[:, :, None]  # [b, N, T]
            changed += [(part, "compute_bias", partial(_bias, part, distance)) for part in self.biased]
        try:
            for part, name, function in changed:
                vars(part)[name] = function
            yield
        finally:
            for part, name, _ in changed:
                vars(part).pop(name, None)


def _embeds(embedding: Any) -> bool:
    """Whether this is an embedding of positions that can be given: learned, in a table, or computed from them."""
    if isinstance(embedding, nn.Embedding) or _skips_padding(embedding):
        return True
    return isinstance(embedding, nn.Module) and "position_ids" in inspect.signature(embedding.forward).parameters


def _skips_padding(embedding: Any) -> bool:
    """Whether positions are counted in fairseq's way: from padding_idx + 1 on, and padding has that of padding_idx."""
    return hasattr(embedding, "create_position_ids_from_input_ids") or hasattr(embedding, "make_positions")


def _table(embedding: Any) -> tuple[Tensor | None, int]:
    """The table [rows, H] of an embedding and the row of position 0; no table if each position is computed."""
    if _skips_padding(embedding):
        return embedding.weight if isinstance(embedding, nn.Embedding) else embedding.weights, embedding.padding_idx + 1
    if not isinstance(embedding, nn.Embedding):
        return None, 0
    return embedding.weight, vars(embedding).get("offset", 0)


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
