"""Flattens arguments to a list of tensors and a hashable description, for traced and captured functions."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import Tensor


class TENSOR:
    """Stands for a tensor in a description."""


def flatten(value: Any) -> tuple[Any, list[Tensor]]:
    """A hashable description of `value` (tensors, tuples, dataclasses, constants), and the tensors in it in order, of
    any shape."""
    tensors: list[Tensor] = []
    return _describe(value, tensors), tensors


def rebuild(spec: Any, tensors: Sequence[Tensor]) -> Any:
    """The inverse of `flatten`, with these tensors, of any shape, in place of the original ones."""
    return _rebuild(spec, iter(tensors))


def _describe(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value)
        return TENSOR
    if type(value) is tuple:
        return (tuple, tuple([_describe(entry, tensors) for entry in value]))
    if dataclasses.is_dataclass(value):
        return (type(value), tuple([_describe(entry, tensors) for entry in value.__dict__.values()]))
    return (None, value)


def _rebuild(spec: Any, tensors: Any) -> Any:
    if spec is TENSOR:
        return next(tensors)
    kind, content = spec
    if kind is None:
        return content
    entries = [_rebuild(entry, tensors) for entry in content]
    return tuple(entries) if kind is tuple else kind(*entries)
