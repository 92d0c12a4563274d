"""Which cache columns each new token of a forward sees: ragged rows, token trees, sliding windows."""

from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from specbench.decoding.token_tree import Tree
from specbench.settings import ConfigError


class AttentionMask:
    """The mask that a Hugging Face model of this configuration takes. Raises ConfigError where some of its
    layers are no attention layers."""

    def __init__(self, config: PretrainedConfig, dtype: torch.dtype, name: str):
        self.config, self.dtype = config, dtype
        self.window = _sliding_window(config, name)

    def __call__(self, slots: Tensor, root: Tensor, visible: int, tree: Tree | None) -> Any:
        """For new tokens in columns slots [B, N], with entry 0 of their tree in column root [B], if they
        are one: a mask [B, 1, N, visible], or one for each kind of layer."""
        seen = seen_columns(slots, root, visible, tree)[:, None]
        if self.window is None:
            return self._as_attention_bias(seen)
        columns = torch.arange(visible, device=slots.device)
        places = slots if tree is None else root[:, None] + tree.depth
        near = seen & (columns > places[:, None, :, None] - self.window)
        if not isinstance(getattr(self.config, "layer_types", None), list):
            return self._as_attention_bias(near)
        masks = {"full_attention": seen, "sliding_attention": near}
        if len(set(self.config.layer_types)) == 1:
            return self._as_attention_bias(masks[self.config.layer_types[0]])
        return {kind: self._as_attention_bias(mask) for kind, mask in masks.items()}

    def _as_attention_bias(self, visible: Tensor) -> Tensor:
        """SDPA takes booleans; the eager attention of transformers adds the mask to its scores."""
        if getattr(self.config, "_attn_implementation", "sdpa") != "eager":
            return visible
        hidden = torch.finfo(self.dtype).min
        return torch.zeros_like(visible, dtype=self.dtype).masked_fill(~visible, hidden)


def seen_columns(slots: Tensor, root: Tensor, visible: int, tree: Tree | None) -> Tensor:
    """[B, N, visible]: every earlier column of its row, and in a tree only the ancestors among the tree's
    entries. slots [B, N], root [B]."""
    columns = torch.arange(visible, device=slots.device)
    if tree is None:
        return columns <= slots[:, :, None]
    B, N, M = len(slots), slots.shape[1], tree.sees.shape[2]
    relative = columns - root[:, None]  # [B, columns], column of entry 0 is 0
    entry = relative.clamp(0, M - 1)[:, None].expand(B, N, visible)
    ancestors = tree.sees.expand(B, N, M).gather(2, entry) & (relative < M)[:, None]
    return torch.where((relative >= 0)[:, None], ancestors, True)


def _sliding_window(config: PretrainedConfig, name: str) -> int | None:
    kinds = set(getattr(config, "layer_types", None) or [])
    if kinds - {"full_attention", "sliding_attention"}:
        raise ConfigError(
            f"target.path={name} has layers of kind {', '.join(sorted(kinds))}: "
            "only attention layers can be rolled back"
        )
    window: int | None = getattr(config, "sliding_window", None)
    uses = "sliding_attention" in kinds or (not kinds and getattr(config, "use_sliding_window", True))
    return window if uses else None
