"""Arguments of traced and captured functions: as tensors and a hashable description, with few numbers of columns."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

SMALLEST_BUCKET = 128  # cache columns


class Columns(int):
    """A number of cache columns. Functions are traced for any such number: it becomes the length of a tensor."""

    def tensor(self) -> Tensor:
        """A tensor of this length, whose values nobody reads."""
        return torch.empty(self, dtype=torch.uint8)


class TENSOR:
    """Stands for a tensor in a description."""


class COLUMNS:
    """Stands for a number of columns in a description."""


def flatten_arguments(value: Any) -> tuple[Any, list[Any]]:
    """A hashable description of `value` (tensors, tuples, named ones too, dataclasses, constants), and in order the
    tensors in it, of any shape, and its numbers of columns."""
    tensors: list[Any] = []
    return _describe(value, tensors), tensors


def rebuild(spec: Any, tensors: Sequence[Tensor]) -> Any:
    """The inverse of `flatten_arguments`, with these tensors, of any shape, in place of the original ones."""
    return _rebuild(spec, iter(tensors))


def _describe(value: Any, tensors: list[Any]) -> Any:
    own: Any = type(value)
    kind = _kind_of(own)
    if kind is None:
        return (None, value)
    if kind is TENSOR or kind is COLUMNS:
        tensors.append(value)
        return kind
    entries = value if issubclass(kind, tuple) else value.__dict__.values()
    return (kind, tuple([_describe(entry, tensors) for entry in entries]))


@functools.cache
def _kind_of(own: type) -> type | None:
    """What the description of a value of this type begins with; None for a constant."""
    if issubclass(own, Tensor):
        return TENSOR
    if issubclass(own, Columns):
        return COLUMNS
    return own if own is tuple or hasattr(own, "_fields") or dataclasses.is_dataclass(own) else None


def _rebuild(spec: Any, tensors: Iterator[Tensor]) -> Any:
    if spec is TENSOR:
        return next(tensors)
    if spec is COLUMNS:
        return next(tensors).shape[0]
    kind, content = spec
    if kind is None:
        return content
    entries = [_rebuild(entry, tensors) for entry in content]
    return tuple(entries) if kind is tuple else kind(*entries)


def bucket(needed: int, capacity: int | None = None) -> int:
    """The next power of two from `needed` on, at least the smallest bucket and at most `capacity`."""
    size = max(SMALLEST_BUCKET, 1 << (needed - 1).bit_length())
    return size if capacity is None else min(size, capacity)


def bucket_lengths(columns: int) -> list[int]:
    """One text length, in tokens, in every bucket up to `columns`."""
    sizes = [SMALLEST_BUCKET]
    while sizes[-1] < columns:
        sizes.append(2 * sizes[-1])
    return [2, *(size // 2 + 1 for size in sizes[1:])]
