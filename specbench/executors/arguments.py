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


def flatten(value: Any) -> tuple[Any, list[Any]]:
    """A hashable description of `value` (tensors, tuples, dataclasses, constants), and in order the tensors in it, of
    any shape, and its numbers of columns."""
    tensors: list[Any] = []
    return _describe(value, tensors), tensors


def rebuild(spec: Any, tensors: Sequence[Tensor]) -> Any:
    """The inverse of `flatten`, with these tensors, of any shape, in place of the original ones."""
    return _rebuild(spec, iter(tensors))


def _describe(value: Any, tensors: list[Any]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value)
        return TENSOR
    if isinstance(value, Columns):
        tensors.append(value)
        return COLUMNS
    if type(value) is tuple:
        return (tuple, tuple([_describe(entry, tensors) for entry in value]))
    if dataclasses.is_dataclass(value):
        return (type(value), tuple([_describe(entry, tensors) for entry in value.__dict__.values()]))
    return (None, value)


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
