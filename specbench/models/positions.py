"""How decoders of transformers are given a position for each new token of each row.

Most causal modules take positions. The others count them from the length of the cache, one number for all rows. Inside
`Positions.at` what such a decoder makes of positions is made of those of the forward: an embedding (BART, Pegasus,
Marian, M2M-100), a bias by distance (T5), ALiBi (Bloom, MPT, Falcon), local windows (GPT-Neo). Outside of it the module
is as transformers made it. b rows, N new tokens, T columns, H hidden, V vocabulary.
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from specbench.decoding.executor import Executor, cache_argument
from specbench.models.attention_mask import TokenPlaces
from specbench.settings import UNLIMITED_CONTEXT

BY_MASK = "build_alibi_tensor"  # of an attention mask [b, T]: a method of Bloom's decoder, a function beside Falcon's
BY_LENGTH = "build_mpt_alibi_tensor"  # of a number of columns: a method of MPT's decoder

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
    def at(self, places: TokenPlaces) -> Iterator[None]:
        """Inside this context the decoder's new tokens stand there. Raises ValueError for a tree if a bias is one for
        all rows."""
        before: list[Change] = []
        try:
            for patch in self.patches:
                for names, name, value in patch(places):
                    before.append((names, name, names.get(name)))
                    names[name] = value
            yield
        finally:
            for names, name, value in reversed(before):
                if value is None:
                    del names[name]
                else:
                    names[name] = value


class Decoder:
    """How a causal module without an encoder is called."""

    def __init__(self, stock: PreTrainedModel, module: Any, places: bool = True):
        """`module` is the one that is called: `stock` as transformers made it, or what an executor made of it. Without
        `places` it has no positions but those of its arguments."""
        accepted = inspect.signature(stock.forward).parameters
        inner = inspect.signature(_decoder_of(stock).forward).parameters
        self.cache_name = cache_argument(module.forward)
        self.skips_logits = "logits_to_keep" in accepted
        self.takes_positions = "position_ids" in accepted or ("kwargs" in accepted and "position_ids" in inner)
        # RoBERTa and its kin count a text's positions from the one behind their padding's.
        parts: Iterable[Any] = stock.modules()
        padded = (part for part in parts if hasattr(part, "create_position_ids_from_input_ids"))
        self.first = next((int(part.padding_idx) + 1 for part in padded), 0)
        # The attention functions of transformers take any strides; attention that a model writes itself may not.
        self.contiguous = not (isinstance(stock, PreTrainedModel) and stock.is_backend_compatible())
        decoder = _decoder_of(module)
        counted = Positions(decoder, COUNTED)
        self.counts_positions = bool(counted.patches)
        given = None if self.takes_positions or not places else Positions(decoder)
        self.patched = counted if self.counts_positions else given

    def obstacle(self, executor: Executor) -> str | None:
        """Why an executor cannot run it: what is traced does not change with positions that are no arguments."""
        possible = executor.runs_encoders and not (executor.compiles and self.counts_positions)
        if self.patched is not None and not possible:
            return "its positions are no arguments of its forward: choose executor=auto or eager"
        return None

    def logits(
        self, module: Any, words: dict[str, Tensor], places: TokenPlaces, seen: dict[str, Any], keep_logits: int
    ) -> Tensor:
        """Logits [b, N, V] (only the last `keep_logits` if not 0) of new tokens, `words` being their ids or embeddings,
        as the module computes them. `seen` is the cache, and what says which of its columns they see."""
        if self.takes_positions:
            seen["position_ids"] = places.positions + self.first
        if self.skips_logits:
            seen["logits_to_keep"] = keep_logits
        with nullcontext() if self.patched is None else self.patched.at(places):
            found: Tensor = module(**words, **seen, use_cache=True).logits
        return found


def _decoder_of(module: Any) -> Any:
    """The part of a module that reads tokens, or the module itself."""
    return module.get_decoder() if hasattr(module, "get_decoder") else module


# -- The kinds of patches ---------------------------------------------------------------------------


def embedding_of_positions(decoder: Any) -> Patch | None:
    """Learned or computed embeddings of positions."""
    embedding = getattr(decoder, "embed_positions", None)
    if not _embeds(embedding):
        return None
    return lambda places: [(vars(embedding), "forward", partial(_embedded, embedding, places.positions))]


def bias_by_distance(decoder: Any) -> Patch | None:
    """T5's self-attention with a bias by distance of its own; the other layers use that of the first."""
    parts = [part for part in decoder.modules()
             if getattr(part, "has_relative_attention_bias", False) and hasattr(part, "compute_bias")]  # fmt: skip

    def patch(places: TokenPlaces) -> list[Change]:
        distance = places.of_columns[:, None] - places.positions[:, :, None]  # [b, N, T]
        return [(vars(part), "compute_bias", partial(_bias, part, distance)) for part in parts]

    return patch if parts else None


def alibi_of_mask(decoder: Any) -> Patch | None:
    """ALiBi that is made of an attention mask, by the decoder's own method or a function of its Python module."""
    method = getattr(decoder, BY_MASK, None)
    names = vars(sys.modules[type(decoder).__module__]) if method is None else vars(decoder)
    if method is None and not (getattr(decoder, "use_alibi", False) and BY_MASK in names):
        return None

    def patch(places: TokenPlaces) -> list[Change]:
        there = places.of_columns.expand(len(places.positions), -1)  # [b, T]
        make = getattr(decoder, BY_MASK, None) or names[BY_MASK]
        return [(names, BY_MASK, partial(_alibi_by_row, make, there))]

    return patch


def alibi_of_length(decoder: Any) -> Patch | None:
    """ALiBi that is made of a number of columns, one for all rows, which a tree's columns cannot have."""
    if not hasattr(decoder, BY_LENGTH):
        return None

    def patch(places: TokenPlaces) -> list[Change]:
        if places.tree is not None:
            raise ValueError("its ALiBi bias is one for all rows, so that it cannot read trees")
        make = getattr(decoder, BY_LENGTH)  # of heads and a length: [heads, 1, T]
        return [(vars(decoder), BY_LENGTH, lambda heads, length, **o: make(heads, max(length, places.visible), **o))]

    return patch


def local_windows(decoder: Any) -> Patch | None:
    """GPT-Neo's local layers, which hide columns by their distance."""
    parts = [p for p in decoder.modules() if getattr(p, "attention_type", None) == "local" and hasattr(p, "bias")]

    def patch(places: TokenPlaces) -> list[Change]:
        there, positions = places.of_columns[:, None], places.positions[:, :, None]
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


def _table(embedding: Any) -> tuple[Tensor | None, int]:
    """The table [rows, H] of an embedding and the row of position 0; no table if each position is computed."""
    if _skips_padding(embedding):
        return embedding.weight if isinstance(embedding, nn.Embedding) else embedding.weights, embedding.padding_idx + 1
    return getattr(embedding, "weight", None), getattr(embedding, "offset", 0)


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
    known = {"bidirectional": False, "num_buckets": attention.relative_attention_num_buckets,
             "max_distance": attention.relative_attention_max_distance}  # fmt: skip
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
