"""Checks that parsed JSON has the shape that a dataclass declares."""

import dataclasses
import sys
import types
import typing
from typing import Any


def check_shape(value: Any, kind: Any, where: str) -> None:
    """Raises ValueError, whose text completes the sentence "FILE cannot be used: ...", if the value is not of this
    kind: a dataclass, a list, dict, tuple or union of kinds, or a plain type. Fields that have a default may be
    missing."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        _check_fields(value, kind, where)
    elif kind is Any:
        return
    elif origin in (types.UnionType, typing.Union):
        if value is not None:
            check_shape(value, next(option for option in inner if option is not types.NoneType), where)
    elif origin is dict:
        for key, entry in _expect(value, dict, where).items():
            check_shape(entry, inner[1], f"{where}.{key}")
    elif origin is list:
        for number, entry in enumerate(_expect(value, list, where)):
            check_shape(entry, inner[0], f"{where}[{number}]")
    elif origin is tuple:
        if len(_expect(value, list, where)) != len(inner):
            raise ValueError(f"{where} has {len(value)} entries, not {len(inner)}")
        for number, (entry, each) in enumerate(zip(value, inner, strict=True)):
            check_shape(entry, each, f"{where}[{number}]")
    else:
        _expect(value, kind, where)


def _check_fields(value: Any, kind: Any, where: str) -> None:
    hints = typing.get_type_hints(kind)
    found = _expect(value, dict, where)
    for field in dataclasses.fields(kind):
        name = f"{where}.{field.name}" if where else field.name
        if field.name in found:
            check_shape(found[field.name], hints[field.name], name)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ValueError(f"it has no {name}")


def _expect(value: Any, kind: type, where: str) -> Any:
    """The value, if it is of a plain type; an integer is a number too, true and false are not."""
    allowed = (int, float) if kind is float else kind
    finite = not isinstance(value, (int, float)) or abs(value) <= sys.float_info.max
    if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool) or not finite:
        words = {dict: "an object", list: "a list", float: "a finite number", int: "an integer", str: "text",
                 bool: "true or false"}[kind]  # fmt: skip
        raise ValueError(f"{where or 'it'} is {repr(value)[:40]}, not {words}")
    return value
