"""Attention masks: which cache columns each new token of a forward sees (ragged rows, trees, windows, chunks).

b rows, N new tokens, T columns that they see, M entries of a tree.
"""

import inspect
from collections.abc import Iterable
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PretrainedConfig, PreTrainedModel

from specbench.decoding.token_tree import Tree
from specbench.errors import ConfigError

ALIGNED = 8  # numbers of 16 bits: a multiple of 16 bytes
ATTENDING = {
    "full_attention": "full_attention",
    "sliding_attention": "sliding_attention",
    "hybrid": "full_attention",
    "hybrid_sliding": "sliding_attention",
}  # kinds of layers, and their attention
RECURRENT = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}  # kinds of layers with a state
OTHERS = {"moe", "mlp"}  # kinds without attention or state
WITHOUT_MASK = {"linear_attention", "conv", *OTHERS}  # kinds of layers that see no column of the cache
ATTENTION = {"full_attention", "sliding_attention", "chunked_attention", "indexed_attention"}  # of models without one


class TokenPlaces(NamedTuple):
    """Where the new tokens of a forward stand."""

    slots: Tensor  # [b, N], their columns
    positions: Tensor  # [b, N]
    first: Tensor  # [b], the column of the first of them; below 0 if it stands before the text
    visible: int  # columns that they see
    tree: Tree | None

    @property
    def columns(self) -> Tensor:
        """[1, T]: the columns that are read."""
        return torch.arange(self.visible, device=self.first.device)[None]

    @property
    def root(self) -> Tensor:
        """[b]: the column of entry 0 of their tree, if they are one."""
        return self.first if self.tree is None else self.first - (self.tree.sees.shape[2] - self.slots.shape[1])

    @property
    def of_columns(self) -> Tensor:
        """[b or 1, T]: the position of each column, of those that are seen. The columns of a tree's entries, from root
        on, stand at the entries' depths behind the root."""
        columns = self.columns
        if self.tree is None:
            return columns
        sees, root = self.tree.sees, self.root
        depth = torch.where(sees, sees.long().cumsum(-1) - 1, 0).amax(1)  # [1 or b, M]
        relative = columns - root[:, None]  # [b, T], column of entry 0 is 0
        entry = relative.clamp(0, depth.shape[1] - 1)
        inside = root[:, None] + depth.expand(len(root), -1).gather(1, entry)
        return torch.where(relative >= 0, inside, columns)

    @property
    def seen(self) -> Tensor:
        """[b, N, T] bool: every column up to the token's own and, of a tree's entries, only ancestors and itself."""
        columns = self.columns
        if self.tree is None:
            return columns[:, None] <= self.slots[:, :, None]
        (b, N), M = self.slots.shape, self.tree.sees.shape[2]
        relative = columns - self.root[:, None]
        entry = relative.clamp(0, M - 1)[:, None].expand(b, N, self.visible)
        ancestors = self.tree.sees.expand(b, N, M).gather(2, entry) & (relative < M)[:, None]
        return torch.where((relative >= 0)[:, None], ancestors, True)


def places_of(first: Tensor, tokens: int, visible: int, tree: Tree | None) -> TokenPlaces:
    """Where so many new tokens stand: at first [b] and behind or, in a tree, by depth. Those in front of the text stand
    where its first token does."""
    slots = (first[:, None] + torch.arange(tokens, device=first.device)).clamp(min=0)
    places = TokenPlaces(slots, slots, first, visible, tree)
    return places if tree is None else places._replace(positions=(places.root[:, None] + tree.depth).clamp(min=0))


class AttentionMask:
    """Makes the mask that a Hugging Face model of this configuration takes."""

    def __init__(self, config: PretrainedConfig, dtype: torch.dtype):
        self.config, self.dtype = config, dtype
        self.window, self.chunk = sliding_window(config), getattr(config, "attention_chunk_size", None)
        self.layers = layer_kinds(config)

    def __call__(self, places: TokenPlaces) -> Any:
        """The mask [b, 1, N, T] of new tokens, or one for each kind of layer."""
        masks = self.by_kind(places, self.kinds)
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def by_kind(self, places: TokenPlaces, kinds: Iterable[str]) -> dict[str, Any]:
        """The mask [b, 1, N, T] of these kinds of layers."""
        return {kind: self.as_bias(seen) for kind, seen in self.seen(places, kinds).items()}

    def seen(self, places: TokenPlaces, kinds: Iterable[str]) -> dict[str, Tensor]:
        """By these kinds of layers, [b, 1, N, T] bool: of the columns that new tokens see the near ones."""
        found, seen, positions = {}, places.seen, places.positions[:, :, None]
        for kind in kinds:
            near = seen
            if ATTENDING.get(kind) == "sliding_attention" and self.window is not None:
                near = seen & (places.of_columns[:, None] > positions - self.window)
            elif kind == "chunked_attention" and self.chunk is not None:
                near = seen & (places.of_columns[:, None] // self.chunk == positions // self.chunk)
            found[kind] = near[:, None]
        return found

    @cached_property
    def kinds(self) -> set[str]:
        """The kinds of attention of all layers."""
        return set(self.layers) or {"full_attention" if self.window is None else "sliding_attention"}

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The sliding window of each layer in tokens, its own included, or None; one entry if all are alike."""
        if not self.layers:
            return (self.window,)
        return tuple(self.window if kind == "sliding_attention" else None for kind in self.layers)

    def as_bias(self, visible: Tensor) -> Tensor:
        """visible [b, 1, N, T] bool as the mask [b, 1, N, T]: booleans for SDPA, or numbers that are added to scores,
        for transformers' eager attention and for SDPA on CUDA, which would make them of booleans in every layer."""
        if visible.device.type == "cuda":
            return aligned_bias(visible, self.dtype)
        if self.config._attn_implementation != "eager":
            return visible
        hidden = torch.finfo(self.dtype).min
        return torch.zeros_like(visible, dtype=self.dtype).masked_fill(~visible, hidden)


def aligned_bias(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """visible [b, 1, N, T] bool as addends [b, 1, N, T], rows at multiples of 16 bytes: SDPA copies others on CUDA."""
    columns = visible.shape[-1]
    padded = F.pad(visible, (0, -columns % ALIGNED))
    return torch.where(padded, 0.0, torch.finfo(dtype).min).to(dtype)[..., :columns]


def layer_kinds(config: PretrainedConfig) -> list[str]:
    """The kind of each layer; empty if the configuration does not list them, since they are alike."""
    return list(getattr(config, "layer_types", None) or [])


def sliding_window(config: PretrainedConfig) -> int | None:
    """The width of the sliding window in tokens, or None."""
    kinds = layer_kinds(config)
    slides = any(ATTENDING.get(kind) == "sliding_attention" for kind in kinds)
    uses = slides or (not kinds and getattr(config, "use_sliding_window", True))
    return getattr(config, "sliding_window", None) if uses else None


def has_state(config: PretrainedConfig) -> bool:
    """Whether models of this configuration have layers of a kind that carries a state."""
    return not config.is_encoder_decoder and bool(RECURRENT.intersection(layer_kinds(config.get_text_config())))


def carries_state(module: PreTrainedModel) -> bool:
    """Whether layers of a module carry a state, in a way that is known or in another one."""
    kinds = set(layer_kinds(module.config.get_text_config()))
    if kinds and kinds <= ATTENTION:  # as in some models of architectures that may have a state
        return False
    takes_state = "cache_params" in inspect.signature(module.forward).parameters
    return has_state(module.config) or module._is_stateful or takes_state


def attending_layers(text: PretrainedConfig) -> int:
    """How many layers of a model with a state also attend to earlier tokens."""
    return sum(kind not in WITHOUT_MASK for kind in layer_kinds(text))


def refuse_unknown_kinds(config: PretrainedConfig, name: str) -> None:
    """Raises ConfigError if a model has layers of a kind that is neither attention nor known to keep a state."""
    own = config if config.is_encoder_decoder else config.get_text_config()
    unknown = set(layer_kinds(own)) - {*ATTENTION, *ATTENDING, *RECURRENT, *OTHERS}
    if unknown:
        kinds = ", ".join(sorted(unknown))
        raise ConfigError(f"{name} has layers of kind {kinds}, which are not known: give another model")
