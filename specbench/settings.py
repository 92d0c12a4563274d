"""Typed, bounded settings: the base of a component's `Settings` dataclass, and their checks and errors.

Types and bounds stand in code beside the class that uses them, values in `conf/`.
"""

import dataclasses
import functools
import hashlib
import math
import operator
import os
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specbench.errors import ConfigError, first_line, shown, unknown

SMALLEST, LARGEST = 1e-30, 1e30  # of a float that is not 0: float32 holds it, its square and its inverse
LARGEST_INTEGER = 2**63 - 1
NUMBER = re.compile(r"[+-]?\d+")
WORDS: dict[Any, str] = {
    int: "an integer", float: "a number", bool: "true or false", str: "text that is not empty", Any: "any value",
    dict[str, Any]: "a mapping of keys to values",
    list[int]: "a list of integers", list[float]: "a list of numbers", list[str]: "a list of texts that are not empty",
}  # fmt: skip
BOUNDS = {"ge": (">=", operator.ge), "gt": (">", operator.gt), "le": ("<=", operator.le)}


@dataclasses.dataclass
class BaseSettings:
    """Base class of every schema: a dataclass whose fields are made by `setting`."""

    def check(self, prefix: str) -> None:
        """Checks what bounds of single fields cannot express. `prefix` is the group, "drafter.". Raises ConfigError."""

    def models(self) -> "Sequence[BaseSettings]":
        """Settings of the checkpoints that the component loads, for the memory estimate."""
        return ()

    def own_bytes(self, target: Any, size: Any, itemsize: int) -> tuple[int, int, int]:
        """Bytes of what the component reads from a checkpoint beside `models`: of weights, of keys and values at a
        position, and of what it keeps of a prompt's token until it has read the prompt. `target` are the target's
        settings, `size` is its `ModelSize`; numbers take `itemsize` bytes. Of hub ids zeros."""
        return 0, 0, 0

    def divided(self) -> str:
        """The setting that divides the model among devices, as "device_map=auto", or ""."""
        return ""

    def sources(self) -> Mapping[str, str]:
        """Versions of what the component reads besides its settings, by the setting that names it: a finished run is
        used again only if they are what they were. `specbench.data.sources` finds them."""
        return {}


def file_hash(path: str | Path) -> str:
    """A hash of a file's contents, for `BaseSettings.sources`."""
    try:
        found = os.stat(path)
        return _hash_of(str(path), found.st_size, found.st_mtime_ns, found.st_ino)
    except OSError:
        return "cannot be read"


@functools.lru_cache(maxsize=1024)
def _hash_of(path: str, size: int, mtime_ns: int, inode: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def setting(*, choices: Iterable[Any] | None = None, zero: bool = False, required: str | None = None,
            default: Any = MISSING, roles: Any = None, **bounds: float) -> Any:  # fmt: skip
    """A field of a Settings dataclass, with the bounds `ge`, `gt` and `le`; `zero=True` also allows 0, outside the
    bounds. `required` says what a missing value should be; `roles`, of a run's own scalars, what depends on it."""
    allowed = {"choices": choices and tuple(choices), "zero": zero, "bounds": bounds}
    return dataclasses.field(default=default, metadata=allowed | {"required": required, "roles": roles})


Schema = TypeVar("Schema", bound=BaseSettings)


def validate(schema: type[Schema], node: DictConfig, prefix: str = "") -> Schema:
    """The node of a group ("drafter." is its prefix) as an instance of the schema. Raises ConfigError."""
    fields = {field.name: field for field in dataclasses.fields(schema)}
    hints = get_type_hints(schema)
    values: dict[str, Any] = {}
    for name in (str(name) for name in node if name != "_target_"):
        key = f"{prefix}{name}"
        if name not in fields:
            raise unknown(key, (f"{prefix}{field}" for field in fields), "setting")
        value = resolved(node, name, key)
        if value != MISSING:
            values[name] = accepted(key, value, hints[name], fields[name])
    for name, field in fields.items():
        if name not in values and field.default == MISSING:
            what = field.metadata.get("required") or "a value"
            raise ConfigError(f"{prefix}{name} is not set: give {what} with {prefix}{name}=...")
    settings = schema(**values)
    settings.check(prefix)
    return settings


def resolved(node: DictConfig, name: str, key: str) -> Any:
    """A key's value in plain Python, interpolations resolved; "???" if it is missing. Raises ConfigError."""
    if OmegaConf.is_missing(node, name):
        return MISSING
    try:
        value = node[name]
        if OmegaConf.is_config(value):
            return OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
        return value
    except (OmegaConfBaseException, RecursionError) as error:
        raw: Any = OmegaConf.to_container(node, resolve=False)
        raise ConfigError(f"{key}={shown(raw[name])} is not allowed: {first_line(error)}") from error


def accepted(key: str, value: Any, hint: Any, field: dataclasses.Field[Any]) -> Any:
    """The value as the type `hint`: an integer for a number or a text, or a text that spells a number (as an
    environment variable does), is converted. Raises ConfigError for any other type, for what is outside the field's
    bounds, numbers that are not finite or that float32 cannot hold, and text that is empty or cannot be encoded."""
    kinds = kinds_of(hint)
    if value is None and types.NoneType in kinds:
        return None
    if hint is Any or (isinstance(value, dict) and any(get_origin(kind) is dict for kind in kinds)):
        refuse_odd_numbers(key, value)
        return value
    lists = [kind for kind in kinds if get_origin(kind) is list]
    if lists and isinstance(value, list):
        (of_entry,) = get_args(lists[0])
        return [accepted(key, entry, of_entry, field) for entry in value]
    found = SCALARS[kinds[0]](value) if kinds[0] in SCALARS else None
    if found is None or not within_bounds(found, field):
        raise ConfigError(f"{key}={shown(value if found is None else found)} is not allowed: it must be "
                          f"{describe(field)}")  # fmt: skip
    return found


def kinds_of(hint: Any) -> tuple[Any, ...]:
    """The types of a union, or the type itself."""
    return get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def _integer(value: Any) -> int | None:
    if isinstance(value, str) and value.isascii() and NUMBER.fullmatch(value) and len(value) < 25:
        value = int(value)
    fits = isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST_INTEGER
    return value if fits else None


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        found = float(value)
    except (ValueError, OverflowError):
        return None
    return found if found == 0 or SMALLEST <= abs(found) <= LARGEST else None


def _truth(value: Any) -> bool | None:
    if isinstance(value, str):
        return {"true": True, "false": False}.get(value.lower())
    return value if isinstance(value, bool) else None


def _text(value: Any) -> str | None:
    if isinstance(value, bool):
        value = str(value).lower()  # so are true and false
    elif isinstance(value, int):
        value = str(value) if abs(value) <= LARGEST_INTEGER else None  # name=5 is a text for Hydra's grammar too
    if not isinstance(value, str) or not value or "\0" in value:
        return None
    return None if any("\ud800" <= character <= "\udfff" for character in value) else value


SCALARS: dict[Any, Callable[[Any], Any]] = {int: _integer, float: _number, bool: _truth, str: _text}


def refuse_odd_numbers(key: str, value: Any) -> None:
    """Raises ConfigError if a number in the value, at any depth, is not finite or too large."""
    if isinstance(value, dict | list):
        for name, entry in value.items() if isinstance(value, dict) else enumerate(value):
            refuse_odd_numbers(f"{key}.{shown(name)}", entry)
    elif isinstance(value, int | float) and not (math.isfinite(value) if isinstance(value, float) else
                                                 abs(value) <= LARGEST_INTEGER):  # fmt: skip
        raise ConfigError(f"{key}={shown(value)} is not allowed: numbers must be finite, integers below 2^63")


def within_bounds(value: Any, field: dataclasses.Field[Any]) -> bool:
    """Whether the value, or an entry of a list, is inside the field's bounds."""
    limits = field.metadata
    if limits.get("choices"):
        return value in limits["choices"]
    if isinstance(value, str | bool) or (limits.get("zero") and value == 0):
        return True
    return all(BOUNDS[name][1](value, bound) for name, bound in limits.get("bounds", {}).items())


def describe(field: dataclasses.Field[Any]) -> str:
    """What a field accepts, in words: "an integer >= 1"."""
    limits, kinds = field.metadata, kinds_of(field.type)
    null = " or null" if types.NoneType in kinds else ""
    if limits.get("choices"):
        return "one of " + ", ".join(map(str, limits["choices"])) + null
    words = " or ".join(WORDS[kind] for kind in kinds if kind in WORDS)
    bounds = " and ".join(f"{BOUNDS[name][0]} {bound:{'' if isinstance(bound, int) else 'g'}}"
                          for name, bound in limits.get("bounds", {}).items())  # fmt: skip
    return ("0 or " if limits.get("zero") else "") + f"{words} {bounds}".strip() + null


# Bounds within which float32 logits stay finite and keep their order, for `setting`.
TEMPERATURE: dict[str, Any] = {"ge": 1e-3, "le": 1e3, "zero": True}
TOP_K: dict[str, Any] = {"ge": 0, "le": 10**9}
TOP_P: dict[str, Any] = {"ge": 1e-6, "le": 1}
REPETITION_PENALTY: dict[str, Any] = {"ge": 1e-2, "le": 1e2}
LENIENCE: dict[str, Any] = {"ge": 1e-6, "le": 1}  # p / l
MOST_BEAMS = 64  # w of a beam search
LARGEST_GAMMA = 1000  # guesses of a draft, one after another
LARGEST_SEED = 2**32 - 1  # of numpy; torch takes larger ones
UNLIMITED_CONTEXT = 2**31 - 1  # tokens: of a model whose positions have no end, such as T5
