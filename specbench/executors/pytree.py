"""Flattens arguments to a list of tensors and a hashable description, for traced and captured functions."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class TENSOR:
    """Stands for a tensor in a description."""


class Columns(int):
    """A number of cache columns. Functions are traced for any such number: it becomes the length of a tensor."""

    def tensor(self) -> Tensor:
        """A tensor of this length, whose values nobody reads."""
        return torch.empty(self, dtype=torch.uint8)


class COLUMNS:
    """Stands for a number of columns in a description."""


class STRUCTURE:
    """The sort of dataclasses."""


class CONSTANT:
    """The sort of all other values."""


SORTS: dict[type, type] = {}  # by type of a value: TENSOR, COLUMNS, tuple, STRUCTURE or CONSTANT


def flatten(value: Any) -> tuple[Any, list[Any]]:
    """A hashable description of `value` (tensors, tuples, dataclasses, constants), and in order the tensors in it, of
    any shape, and its numbers of columns."""
    tensors: list[Any] = []
    return _describe(value, tensors), tensors


def rebuild(spec: Any, tensors: Sequence[Tensor]) -> Any:
    """The inverse of `flatten`, with these tensors, of any shape, in place of the original ones."""
    return _rebuild(spec, iter(tensors))


def _describe(value: Any, tensors: list[Any]) -> Any:
    kind = type(value)
    sort = SORTS.get(kind) or _sort_of(kind)
    if sort is CONSTANT:
        return (None, value)
    if sort is TENSOR or sort is COLUMNS:
        tensors.append(value)
        return sort
    entries = value if sort is tuple else value.__dict__.values()
    return (kind, tuple([_describe(entry, tensors) for entry in entries]))


def _sort_of(kind: type) -> type:
    """What values of a type are to `flatten`; it is asked once for each type, since every call of a program flattens
    its arguments."""
    sort: type = CONSTANT
    if issubclass(kind, Tensor):
        sort = TENSOR
    elif issubclass(kind, Columns):
        sort = COLUMNS
    elif kind is tuple:
        sort = tuple
    elif dataclasses.is_dataclass(kind):
        sort = STRUCTURE
    SORTS[kind] = sort
    return sort


def _rebuild(spec: Any, tensors: Any) -> Any:
    if spec is TENSOR:
        return next(tensors)
    if spec is COLUMNS:
        return next(tensors).shape[0]
    kind, content = spec
    if kind is None:
        return content
    entries = [_rebuild(entry, tensors) for entry in content]
    return tuple(entries) if kind is tuple else kind(*entries)
