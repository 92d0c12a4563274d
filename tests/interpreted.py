"""Triton's interpreter without half of its cost: at each call of a function it looks through all members of its
language for those to replace. They are always the same ones."""

import importlib.util
import inspect
from functools import cache
from types import SimpleNamespace


def look_once() -> None:
    """Which members of an object are Triton's own functions is found out once, in this process."""
    if importlib.util.find_spec("triton") is None:
        return
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    @cache
    def names(of: object) -> tuple[str, ...]:
        return tuple(name for name, member in inspect.getmembers(of) if is_builtin(member))

    def getmembers(of: object) -> list[tuple[str, object]]:
        return [(name, getattr(of, name)) for name in names(of)]

    interpreter.inspect = SimpleNamespace(**{**vars(inspect), "getmembers": getmembers})
