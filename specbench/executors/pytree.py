"""Arguments of compiled and captured functions: as tensors and a hashable description, with few numbers of columns."""

from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor

SMALLEST_BUCKET = 128  # cache columns


class Columns(int):
    """A number of cache columns. A function is compiled for any such number: it becomes the length of a tensor."""

    def tensor(self) -> Tensor:
        """A tensor of this length, whose values nobody reads."""
        return torch.empty(self, dtype=torch.uint8)


def flatten_arguments(value: Any) -> tuple[Any, list[Any]]:
    """A hashable description of tensors, tuples, dataclasses and constants, and its tensors and numbers of columns."""
    tensors: list[Any] = []
    return _described(value, tensors), tensors


def rebuild(spec: Any, tensors: Sequence[Tensor]) -> Any:
    """The inverse of `flatten_arguments`, with these tensors, of any shape, in place of the original ones."""
    return _rebuilt(spec, iter(tensors))


def _described(value: Any, tensors: list[Any]) -> Any:
    kind: Any = type(value)
    if isinstance(value, Tensor | Columns):
        tensors.append(value)
        return Columns if kind is Columns else Tensor
    if isinstance(value, tuple):  # named ones too
        return (kind, tuple([_described(entry, tensors) for entry in value]))
    if is_dataclass(kind):
        return (kind, tuple([_described(entry, tensors) for entry in vars(value).values()]))
    return (None, value)


def _rebuilt(spec: Any, tensors: Iterator[Tensor]) -> Any:
    if spec is Tensor:
        return next(tensors)
    if spec is Columns:
        return next(tensors).shape[0]
    kind, content = spec
    if kind is None:
        return content
    entries = [_rebuilt(entry, tensors) for entry in content]
    return tuple(entries) if kind is tuple else kind(*entries)


def bucket(needed: int, capacity: int | None = None) -> int:
    """The next power of two from `needed` on, at least the smallest bucket and at most `capacity`."""
    size = max(SMALLEST_BUCKET, 1 << (needed - 1).bit_length())
    return size if capacity is None else min(size, capacity)
