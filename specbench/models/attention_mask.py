"""Attention masks: which cache columns each new token of a forward sees (ragged rows, trees, sliding windows,
chunks).

B rows, N new tokens, M entries of a tree.
"""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PretrainedConfig

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
ATTENTION = {"full_attention", "sliding_attention", "chunked_attention", "indexed_attention"}  # of models without one


class AttentionMask:
    """Makes the mask that a Hugging Face model of this configuration takes."""

    def __init__(self, config: PretrainedConfig, dtype: torch.dtype):
        self.config, self.dtype = config, dtype
        self.window, self.chunk = sliding_window(config), getattr(config, "attention_chunk_size", None)

    def __call__(self, slots: Tensor, root: Tensor, visible: int, tree: Tree | None) -> Any:
        """The mask [B, 1, N, visible], or one for each kind of layer, for new tokens in columns slots [B, N]. root [B]
        is the column of entry 0 of their tree, if they are one."""
        kinds = self.kinds
        seen = seen_columns(slots, root, visible, tree)
        if kinds == {"full_attention"}:
            return self.as_bias(seen[:, None])
        positions = slots if tree is None else root[:, None] + tree.depth
        there = positions_of_columns(root, visible, tree)[:, None]  # [B or 1, 1, visible]
        masks = {kind: self.as_bias((seen & self._near(kind, there, positions[:, :, None]))[:, None]) for kind in kinds}
        return masks if len(masks) > 1 else next(iter(masks.values()))

    @cached_property
    def kinds(self) -> set[str]:
        """The kinds of attention of all layers."""
        kinds = getattr(self.config, "layer_types", None)
        if isinstance(kinds, list):
            return set(kinds)
        return {"full_attention" if self.window is None else "sliding_attention"}

    def _near(self, kind: str, there: Tensor, positions: Tensor) -> Tensor | bool:
        """[B, N, columns] bool: which columns, at positions `there` [B or 1, 1, columns], a layer of this kind lets new
        tokens at `positions` [B, N, 1] see, as far as distance decides it."""
        if kind == "sliding_attention" and self.window is not None:
            near: Tensor = there > positions - self.window
            return near
        if kind == "chunked_attention" and self.chunk is not None:
            same: Tensor = there // self.chunk == positions // self.chunk
            return same
        return True

    def by_kind(self, slots: Tensor, visible: int) -> dict[str, Any]:
        """The mask [b, 1, N, visible] of each kind of layer that attends, for new tokens of chains in columns slots
        [b, N]."""
        columns, positions = torch.arange(visible, device=slots.device), slots[:, :, None]
        seen = columns <= positions
        full = self.as_bias(seen[:, None])
        masks = {"full_attention": full, "sliding_attention": full}
        if self.window is not None:
            near = self._near("sliding_attention", columns, positions)
            masks["sliding_attention"] = self.as_bias((seen & near)[:, None])
        return {kind: masks[own] for kind, own in ATTENDING.items()}

    def window_of(self, layer: int) -> int | None:
        """The sliding window of a layer in tokens, its own included, or None."""
        kinds = getattr(self.config, "layer_types", None)
        return self.window if not isinstance(kinds, list) or kinds[layer] == "sliding_attention" else None

    def as_bias(self, visible: Tensor) -> Tensor:
        """visible [B, 1, N, columns] bool as the mask [B, 1, N, columns]: booleans for SDPA, or numbers that are added
        to scores, for the eager attention of transformers and for SDPA on CUDA, which would make them of booleans in
        every layer."""
        if visible.device.type == "cuda":
            return aligned_bias(visible, self.dtype)
        if getattr(self.config, "_attn_implementation", "sdpa") != "eager":
            return visible
        hidden = torch.finfo(self.dtype).min
        return torch.zeros_like(visible, dtype=self.dtype).masked_fill(~visible, hidden)


def aligned_bias(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """visible [B, 1, N, columns] bool as numbers [B, 1, N, columns] that are added to scores. Its rows begin at
    multiples of 16 bytes: otherwise SDPA copies it in every layer on CUDA."""
    columns = visible.shape[-1]
    padded = F.pad(visible, (0, -columns % ALIGNED))
    return torch.where(padded, 0.0, torch.finfo(dtype).min).to(dtype)[..., :columns]


def seen_columns(slots: Tensor, root: Tensor, visible: int, tree: Tree | None) -> Tensor:
    """[B, N, visible] bool: every column up to the token's own and, of a tree's entries, only its ancestors and itself.
    slots [B, N], root [B]."""
    columns = torch.arange(visible, device=slots.device)
    if tree is None:
        return columns <= slots[:, :, None]
    B, N, M = len(slots), slots.shape[1], tree.sees.shape[2]
    relative = columns - root[:, None]  # [B, columns], column of entry 0 is 0
    entry = relative.clamp(0, M - 1)[:, None].expand(B, N, visible)
    ancestors = tree.sees.expand(B, N, M).gather(2, entry) & (relative < M)[:, None]
    return torch.where((relative >= 0)[:, None], ancestors, True)


def positions_of_columns(root: Tensor, visible: int, tree: Tree | None) -> Tensor:
    """[B or 1, visible]: the position of the token in each column. The columns of a tree's entries, from root [B] on,
    stand at the entries' depths behind the root; of entries that no new token sees any value is as good."""
    columns = torch.arange(visible, device=root.device)
    if tree is None:
        return columns[None]
    depth = torch.where(tree.sees, tree.sees.long().cumsum(-1) - 1, 0).amax(1)  # [1 or B, M]
    relative = columns - root[:, None]  # [B, visible], column of entry 0 is 0
    entry = relative.clamp(0, depth.shape[1] - 1)
    inside = root[:, None] + depth.expand(len(root), -1).gather(1, entry)
    return torch.where(relative >= 0, inside, columns)


def sliding_window(config: PretrainedConfig) -> int | None:
    """The width of the sliding window in tokens, or None."""
    kinds = set(getattr(config, "layer_types", None) or [])
    window: int | None = getattr(config, "sliding_window", None)
    slides = any(ATTENDING.get(kind) == "sliding_attention" for kind in kinds)
    uses = slides or (not kinds and getattr(config, "use_sliding_window", True))
    return window if uses else None


def recurrent_kinds(config: PretrainedConfig) -> set[str]:
    """The kinds of a model's layers that carry a state."""
    return RECURRENT & set(getattr(config, "layer_types", None) or [])


def refuse_unknown_kinds(config: PretrainedConfig, name: str) -> None:
    """Raises ConfigError if a model has layers of a kind that is neither attention nor known to keep a state."""
    own = config if config.is_encoder_decoder else config.get_text_config()
    unknown = set(getattr(own, "layer_types", None) or []) - {*ATTENTION, *ATTENDING, *RECURRENT, *OTHERS}
    if unknown:
        raise ConfigError(
            f"{name} has layers of kind {', '.join(sorted(unknown))}, which are not known: give another model"
        )
