"""Reads JSON files, and checks them against the dataclasses that declare their shape."""

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from specbench.errors import ConfigError, first_line

WORDS = {"dict": "an object", "dataclass": "an object", "model": "an object", "list": "a list", "tuple": "a list",
         "int": "an integer", "float": "a finite number", "finite": "a finite number", "string": "text",
         "bool": "true or false"}  # fmt: skip


def file_text(path: Path) -> str:
    """A file's text. Raises ConfigError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({reason(error)})") from error


def reason(error: Exception) -> str:
    """Why a file could not be used, without its path."""
    return str(getattr(error, "strerror", None) or first_line(error))


def parse_json(text: str, where: str) -> Any:
    """The value of a JSON text. Raises ConfigError."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON ({reason(error)})") from error


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def check_kind(value: Any, kind: Any, file: str, where: str = "") -> Any:
    """A parsed JSON value of this kind (a dataclass, a pydantic model or a plain type) with the defaults of what it
    leaves out. Fields that the kind does not have are kept. Raises ConfigError, which names the first field that does
    not fit, below `where`."""
    adapter = _adapter(kind)
    try:
        checked = adapter.validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        raise ConfigError(f"{file} cannot be used: {_sentence(error, value, where)}") from error
    return _filled(value, adapter.dump_python(checked, mode="json"))


def _filled(found: Any, whole: Any) -> Any:
    """What was found, with the fields that only `whole` has."""
    if isinstance(found, dict) and isinstance(whole, dict):
        known = {key: _filled(value, whole[key]) if key in whole else value for key, value in found.items()}
        return known | {key: value for key, value in whole.items() if key not in found}
    if isinstance(found, list) and isinstance(whole, list):
        return [_filled(one, other) for one, other in zip(found, whole, strict=True)]
    return found


def _sentence(error: ValidationError, value: Any, where: str) -> str:
    """The first field that does not fit, and why."""
    first = error.errors(include_url=False)[0]
    place, kind, found = list(first["loc"]), first["type"], first["input"]
    if kind == "missing" and place and isinstance(place[-1], int):  # of a pair
        place, kind = place[:-1], "too_short"
    name = _path([*([where] if where else []), *place])
    if kind == "missing":
        return f"it has no {name}"
    if kind in ("too_short", "too_long"):
        return f"{name} has {len(found)} entries"
    told = WORDS.get(kind.partition("_")[0], first["msg"])
    return f"{name or 'it'} is {repr(found if place else value)[:40]}, not {told}"


def _path(place: Sequence[str | int]) -> str:
    """("a", "b", 0) as a.b[0]."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")
