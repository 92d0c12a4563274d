"""What some decoders derive from the length of the cache by themselves: ALiBi biases, and local attention.

Bloom, MPT and Falcon add a bias that grows with the position of each column, and GPT-Neo's local layers hide columns by
their distance. Both are made inside the module for one length of all rows. Inside `OwnPositions.at` they are those of
the forward; outside of it the module is as transformers made it. b rows, N new tokens, T columns.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from specbench.decoding.token_tree import Tree
from specbench.models.attention_mask import positions_of_columns

BY_MASK = "build_alibi_tensor"  # of an attention mask [b, T]: a method of Bloom's decoder, a function beside Falcon's
BY_LENGTH = "build_mpt_alibi_tensor"  # of a number of columns: a method of MPT's decoder


class OwnPositions:
    """The parts of a decoder that make biases or masks of positions."""

    def __init__(self, decoder: nn.Module):
        self.decoder = decoder
        self.local: list[Any] = [
            part
            for part in decoder.modules()
            if getattr(part, "attention_type", None) == "local" and hasattr(part, "bias")
        ]
        self.owner = _owner(decoder)

    @property
    def any(self) -> bool:
        return bool(self.local) or self.owner is not None or self.by_length

    @property
    def by_length(self) -> bool:
        """Whether the bias is one for all rows, which a tree's columns cannot have."""
        return hasattr(self.decoder, BY_LENGTH)

    @contextmanager
    def at(self, positions: Tensor, root: Tensor, visible: int, tree: Tree | None) -> Iterator[None]:
        """Inside this context the decoder's new tokens stand at positions [b, N] and see `visible` columns; entry 0 of
        their tree, if they are one, is in column root [b]. Raises ValueError for a tree if the bias is one for all
        rows."""
        there = positions_of_columns(root, visible, tree)  # [b or 1, T]
        if self.by_length and tree is not None:
            raise ValueError("its ALiBi bias is one for all rows, so that it cannot read trees")
        changed: list[tuple[dict[str, Any], str, Any]] = []
        try:
            if self.owner is not None:
                rows = there.expand(len(positions), -1)
                changed.append(
                    _put(self.owner, BY_MASK, _by_row(getattr(self.decoder, BY_MASK, None), self.owner, rows))
                )
            if self.by_length:
                changed.append(_put(vars(self.decoder), BY_LENGTH, _of_columns(self.decoder, visible)))
            for attention in self.local:
                near = there[:, None] > positions[:, :, None] - attention.config.window_size  # [b, N, T]
                changed.append(_put(vars(attention), "bias", _Same(near[:, None])))
            yield
        finally:
            for names, name, before in reversed(changed):
                if before is None:
                    del names[name]
                else:
                    names[name] = before


class _Same:
    """Stands for a mask of all positions, of which attention takes a part: any part is this tensor."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor  # [b, 1, N, T] bool

    def __getitem__(self, part: Any) -> Tensor:
        return self.tensor


def _owner(decoder: Any) -> dict[str, Any] | None:
    """The names among which the decoder finds the function that makes a bias of an attention mask: its own or those of
    its Python module; None if it uses none."""
    if hasattr(decoder, BY_MASK):
        own: dict[str, Any] = vars(decoder)
        return own
    beside = vars(sys.modules[type(decoder).__module__])
    return beside if getattr(decoder, "use_alibi", False) and BY_MASK in beside else None


def _put(names: dict[str, Any], name: str, value: Any) -> tuple[dict[str, Any], str, Any]:
    """Sets a name; returns what undoes that."""
    before = names.get(name)
    names[name] = value
    return names, name, before


def _by_row(method: Callable[..., Tensor] | None, owner: dict[str, Any], there: Tensor) -> Callable[..., Tensor]:
    """Makes the bias [b * heads, 1, T] of columns at positions there [b, T], with the decoder's own function."""
    make: Callable[..., Tensor] = method or owner[BY_MASK]

    def build(mask: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
        b, T = there.shape
        all_positions = make(
            torch.ones(1, T, dtype=torch.long, device=there.device), heads, dtype=dtype
        )  # [heads, 1, T]
        found = all_positions[:, 0].expand(b, heads, T).gather(2, there[:, None].expand(b, heads, T))
        return found.reshape(b * heads, 1, T)

    return build


def _of_columns(decoder: Any, visible: int) -> Callable[..., Tensor]:
    """Makes the bias [heads, 1, T] of `visible` columns, with the decoder's own method."""
    make: Callable[..., Tensor] = getattr(decoder, BY_LENGTH)
    return lambda heads, length, **options: make(heads, max(length, visible), **options)
