"""Flattens arguments to a list of tensors and a hashable description, for traced and captured functions."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from specbench.executors.cache_columns import Columns


class TENSOR:
    """Stands for a tensor in a description."""


class COLUMNS:
    """Stands for a number of columns in a description."""


# By type of a value, what its description begins with: TENSOR, COLUMNS, the type of a tuple or dataclass, or None for
# a constant. Kept, since every call of a program flattens its arguments.
_kinds: dict[type, type | None] = {}


def flatten_arguments(value: Any) -> tuple[Any, list[Any]]:
    """A hashable description of `value` (tensors, tuples, dataclasses, constants), and in order the tensors in it, of
    any shape, and its numbers of columns."""
    tensors: list[Any] = []
    return _describe(value, tensors), tensors


def rebuild(spec: Any, tensors: Sequence[Tensor]) -> Any:
    """The inverse of `flatten_arguments`, with these tensors, of any shape, in place of the original ones."""
    return _rebuild(spec, iter(tensors))


def _describe(value: Any, tensors: list[Any]) -> Any:
    own = type(value)
    kind = _kinds[own] if own in _kinds else _kind_of(own)
    if kind is None:
        return (None, value)
    if kind is TENSOR or kind is COLUMNS:
        tensors.append(value)
        return kind
    entries = value if kind is tuple else value.__dict__.values()
    return (kind, tuple([_describe(entry, tensors) for entry in entries]))


def _kind_of(own: type) -> type | None:
    kind: type | None = None
    if issubclass(own, Tensor):
        kind = TENSOR
    elif issubclass(own, Columns):
        kind = COLUMNS
    elif own is tuple or dataclasses.is_dataclass(own):
        kind = own
    _kinds[own] = kind
    return kind


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
