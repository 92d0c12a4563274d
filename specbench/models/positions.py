"""Positions of new tokens in decoders that take none as an argument: what each kind of decoder has changed for them.

Such decoders of transformers count positions from the length of the cache, which is one number for all rows, where
every row and every tree has its own. Inside `Positions.at` what a decoder makes of positions is made of those of the
forward: an embedding (BART, Pegasus, Marian, M2M-100), a bias by distance (T5), ALiBi (Bloom, MPT, Falcon), local
windows (GPT-Neo). Outside of it the module is as transformers made it. b rows, N new tokens, T columns, H hidden.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specbench.decoding.token_tree import Tree
from specbench.models.attention_mask import positions_of_columns
from specbench.settings import UNLIMITED_CONTEXT

BY_MASK = "build_alibi_tensor"  # of an attention mask [b, T]: a method of Bloom's decoder, a function beside Falcon's
BY_LENGTH = "build_mpt_alibi_tensor"  # of a number of columns: a method of MPT's decoder


class TokenPlaces(NamedTuple):
    """Where the new tokens of a forward stand."""

    positions: Tensor  # [b, N]
    root: Tensor  # [b], the column of entry 0 of their tree, if they are one
    visible: int  # columns that they see
    tree: Tree | None

    @property
    def of_columns(self) -> Tensor:
        """The position of each column [b or 1, T]; only columns that are seen count."""
        return positions_of_columns(self.root, self.visible, self.tree)


Change = tuple[dict[str, Any], str, Any]  # names of a module or an object, one of them, and what it stands for
Patch = Callable[[TokenPlaces], list[Change]]


class Positions:
    """What is changed in a decoder for the positions of a forward."""

    def __init__(self, decoder: Any, kinds: "Sequence[Callable[[Any], Patch | None]] | None" = None):
        """`kinds` are those that are looked for, GIVEN by default."""
        self.patches = [patch for kind in kinds or GIVEN if (patch := kind(decoder)) is not None]
        embedding = getattr(decoder, "embed_positions", None)
        self.embedding: Any = embedding if _embeds(embedding) else None

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
        """Inside this context the decoder\'s new tokens stand there, see `TokenPlaces`. Raises ValueError for a tree if
        a bias is one for all rows."""
        place, before = TokenPlaces(positions, root, visible, tree), []
        try:
            for patch in self.patches:
                for names, name, value in patch(place):
                    before.append((names, name, names.get(name)))
                    names[name] = value
            yield
        finally:
            for names, name, value in reversed(before):
                if value is None:
                    del names[name]
                else:
                    names[name] = value


def embedding_of_positions(decoder: Any) -> Patch | None:
    """Learned or computed embeddings of positions."""
    embedding = getattr(decoder, "embed_positions", None)
    if not _embeds(embedding):
        return None
    return lambda place: [(vars(embedding), "forward", partial(_embedded, embedding, place.positions))]


def bias_by_distance(decoder: Any) -> Patch | None:
    """T5's self-attention with a bias by distance of its own; the other layers use that of the first."""
    parts = [part for part in decoder.modules()
             if getattr(part, "has_relative_attention_bias", False) and hasattr(part, "compute_bias")]  # fmt: skip

    def patch(place: TokenPlaces) -> list[Change]:
        distance = place.of_columns[:, None] - place.positions[:, :, None]  # [b, N, T]
        return [(vars(part), "compute_bias", partial(_bias, part, distance)) for part in parts]

    return patch if parts else None


def alibi_of_mask(decoder: Any) -> Patch | None:
    """ALiBi that is made of an attention mask, by the decoder's own method or a function of its Python module."""
    method = getattr(decoder, BY_MASK, None)
    names = vars(sys.modules[type(decoder).__module__]) if method is None else vars(decoder)
    if method is None and not (getattr(decoder, "use_alibi", False) and BY_MASK in names):
        return None

    def patch(place: TokenPlaces) -> list[Change]:
        there = place.of_columns.expand(len(place.positions), -1)  # [b, T]
        make = getattr(decoder, BY_MASK, None) or names[BY_MASK]
        return [(names, BY_MASK, partial(_alibi_by_row, make, there))]

    return patch


def alibi_of_length(decoder: Any) -> Patch | None:
    """ALiBi that is made of a number of columns, one for all rows, which a tree's columns cannot have."""
    if not hasattr(decoder, BY_LENGTH):
        return None

    def patch(place: TokenPlaces) -> list[Change]:
        if place.tree is not None:
            raise ValueError("its ALiBi bias is one for all rows, so that it cannot read trees")
        make = getattr(decoder, BY_LENGTH)

        def build(heads: int, length: int, **options: Any) -> Tensor:
            """The bias [heads, 1, T] of all visible columns."""
            found: Tensor = make(heads, max(length, place.visible), **options)
            return found

        return [(vars(decoder), BY_LENGTH, build)]

    return patch


def local_windows(decoder: Any) -> Patch | None:
    """GPT-Neo's local layers, which hide columns by their distance."""
    parts = [p for p in decoder.modules() if getattr(p, "attention_type", None) == "local" and hasattr(p, "bias")]

    def patch(place: TokenPlaces) -> list[Change]:
        there, positions = place.of_columns[:, None], place.positions[:, :, None]
        near = [there > positions - part.config.window_size for part in parts]  # [b, N, T]
        return [(vars(part), "bias", _AnyPart(seen[:, None])) for part, seen in zip(parts, near, strict=True)]

    return patch if parts else None


GIVEN = (embedding_of_positions, bias_by_distance)  # of decoders whose positions a caller could give
COUNTED = (alibi_of_mask, alibi_of_length, local_windows)  # made of the cache's length even where positions are given


class _AnyPart:
    """Stands for a mask of all positions, of which attention takes a part: any part is this tensor."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor  # [b, 1, N, T] bool

    def __getitem__(self, part: Any) -> Tensor:
        return self.tensor


def _embeds(embedding: Any) -> bool:
    """Whether this is an embedding of positions that can be given: learned, in a table, or computed from them."""
    if isinstance(embedding, nn.Embedding) or _skips_padding(embedding):
        return True
    return isinstance(embedding, nn.Module) and "position_ids" in inspect.signature(embedding.forward).parameters


def _skips_padding(embedding: Any) -> bool:
    """Whether positions are counted in fairseq's way: from padding_idx + 1 on, and padding has that of padding_idx."""
    return hasattr(embedding, "create_position_ids_from_input_ids") or hasattr(embedding, "make_positions")


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


def _alibi_by_row(make: Any, there: Tensor, mask: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """The bias [b * heads, 1, T] of columns at positions there [b, T], by the decoder's own function `make`."""
    b, T = there.shape
    every = make(torch.ones(1, T, dtype=torch.long, device=there.device), heads, dtype=dtype)  # [heads, 1, T]
    found: Tensor = every[:, 0].expand(b, heads, T).gather(2, there[:, None].expand(b, heads, T))
    return found.reshape(b * heads, 1, T)
