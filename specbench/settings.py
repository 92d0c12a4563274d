"""Typed, bounded settings: the base of a component's `Settings` dataclass, and their checks and errors.

Types and bounds stand in code beside the class that uses them, values in `conf/`.
"""

import dataclasses
import difflib
import math
import os
import re
import shutil
import signal
import sys
import textwrap
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specbench.visible import SHOWN, first_line, shown, visible

SMALLEST, LARGEST = 1e-30, 1e30  # of a float that is not 0: float32 holds it, its square and its inverse
LARGEST_INTEGER = 2**63 - 1
LONGEST_SENTENCE = 2000  # characters
NUMBER = re.compile(r"[+-]?\d+")
WORDS = {"int": "an integer", "float": "a number", "bool": "true or false", "str": "text", "list[int]":
         "a list of integers", "list[float]": "a list of numbers", "list[str]": "a list of texts",
         "float | list[float]": "a number or a list of numbers",
         "dict[str, typing.Any]": "a mapping of keys to values"}  # fmt: skip


class ConfigError(Exception):
    """A mistake of the user's: one sentence that names the key, the value and what is allowed."""


class VerdictError(Exception):
    """With strict=true: a run is finished and written, but its verdict is not good."""


class IncompleteError(Exception):
    """Some of several processes have no result. What the others have is written."""


@dataclasses.dataclass
class BaseSettings:
    """Base class of every schema: a dataclass whose fields are made by `setting`."""

    def check(self, prefix: str) -> None:
        """Checks what bounds of single fields cannot express. `prefix` is the group, "drafter.". Raises ConfigError."""

    def models(self) -> "Sequence[BaseSettings]":
        """Settings of the checkpoints that the component loads, for the memory estimate."""
        return ()

    def divided(self) -> str:
        """The setting that divides the component's model among processes or devices, as "tensor_parallel=2"; empty if
        none does."""
        return ""

    def processes(self) -> int:
        """How many processes share the weights of the component's model."""
        return 1

    def sources(self) -> Mapping[str, str]:
        """Versions of what the component reads besides its settings, by the setting that names it: a finished run is
        used again only if they are what they were. `specbench.identity` finds them."""
        return {}


def setting(*, ge: float | None = None, gt: float | None = None, le: float | None = None, zero: bool = False,
            choices: Iterable[Any] | None = None, required: str | None = None,
            default: Any = MISSING) -> Any:  # fmt: skip
    """A field of a Settings dataclass with bounds; with `zero`, 0 is allowed besides. `required` says what a missing
    value should be."""
    return dataclasses.field(
        default=default,
        metadata={"ge": ge, "gt": gt, "le": le, "zero": zero, "choices": choices and tuple(choices),
                  "required": required},
    )  # fmt: skip


Schema = TypeVar("Schema", bound=BaseSettings)


def validate(schema: type[Schema], node: DictConfig, prefix: str = "") -> Schema:
    """The node as an instance of the schema. `prefix` is the group, "drafter.".

    Raises ConfigError for an unknown key, an interpolation that cannot be resolved, a wrong type, a value out of
    bounds, or what `check` refuses.
    """
    fields = {field.name: field for field in dataclasses.fields(schema)}
    hints = get_type_hints(schema)
    values: dict[str, Any] = {}
    for name in (str(name) for name in node if name != "_target_"):
        key = f"{prefix}{name}"
        if name not in fields:
            raise unknown(key, (f"{prefix}{field}" for field in fields), "setting")
        value = resolved(node, name, key)
        values[name] = value if value == MISSING else typed(key, value, hints[name], fields[name])
    settings = schema(**values)
    for field in fields.values():
        key, value = f"{prefix}{field.name}", getattr(settings, field.name)
        if value == MISSING:
            what = field.metadata.get("required") or "a value"
            raise ConfigError(f"{key} is not set: give {what} with {key}=...")
        check_bounds(key, value, field)
    settings.check(prefix)
    return settings


def resolved(node: DictConfig, name: str, key: str) -> Any:
    """The value of a node's key in plain Python, with its interpolations resolved; "???" if it is missing. Raises
    ConfigError, naming the value, if that is not possible."""
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


def typed(key: str, value: Any, hint: Any, field: dataclasses.Field[Any]) -> Any:
    """The value as the type `hint`: an integer for a number or a text, or a text that spells a number (as an
    environment variable does), is converted. Raises ConfigError for any other type, numbers that are not finite or
    that float32 cannot hold, and text that is empty or cannot be encoded."""
    wanted, origin = hint, get_origin(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in get_args(hint):
            return None
        options = [entry for entry in get_args(hint) if entry is not type(None)]
        lists = [entry for entry in options if get_origin(entry) is list]
        wanted = lists[0] if lists and isinstance(value, list) else options[0]
        origin = get_origin(wanted)
    if origin is list and isinstance(value, list):
        return [typed(key, entry, get_args(wanted)[0], field) for entry in value]
    if (origin is dict and isinstance(value, dict)) or wanted is Any:
        refuse_odd_numbers(key, value)
        return value
    if origin not in (list, dict) and wanted not in SCALARS:
        return value
    found = SCALARS[wanted](value) if wanted in SCALARS else None
    if found is None:
        raise ConfigError(f"{key}={shown(value)} is not allowed: it must be {describe(field)}")
    return found


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
    return {"true": True, "false": False}.get(value.lower()) if isinstance(value, str) else _only(bool, value)


def _only(kind: type, value: Any) -> Any:
    return value if isinstance(value, kind) else None


def _text(value: Any) -> str | None:
    if isinstance(value, bool):
        value = str(value).lower()  # so are true and false
    elif isinstance(value, int):
        value = str(value) if abs(value) <= LARGEST_INTEGER else None  # name=5 is a text for Hydra's grammar too
    if not isinstance(value, str) or not value or "\0" in value:
        return None
    return None if any("\ud800" <= character <= "\udfff" for character in value) else value


SCALARS: dict[Any, Any] = {int: _integer, float: _number, bool: _truth, str: _text}


def refuse_odd_numbers(key: str, value: Any) -> None:
    """Raises ConfigError if a number in the value, at any depth, is not finite or too large."""
    if isinstance(value, dict | list):
        for name, entry in value.items() if isinstance(value, dict) else enumerate(value):
            refuse_odd_numbers(f"{key}.{shown(name)}", entry)
    elif (isinstance(value, float) and not math.isfinite(value)) or (
        isinstance(value, int) and not isinstance(value, bool) and _integer(value) is None
    ):
        raise ConfigError(f"{key}={shown(value)} is not allowed: numbers must be finite, integers below 2^63")


def check_bounds(key: str, value: Any, field: dataclasses.Field[Any]) -> None:
    """Raises ConfigError if the value, or an entry of a list, is outside the field's bounds."""
    limits = field.metadata
    if isinstance(value, list):
        for entry in value:
            check_bounds(key, entry, field)
        return
    if value is None or (limits.get("zero") and value == 0):
        return
    if limits.get("choices"):
        inside = value in limits["choices"]
    elif isinstance(value, str | bool | dict):
        return
    else:
        inside = ((limits.get("ge") is None or value >= limits["ge"])
                  and (limits.get("gt") is None or value > limits["gt"])
                  and (limits.get("le") is None or value <= limits["le"]))  # fmt: skip
    if not inside:
        raise ConfigError(f"{key}={shown(value)} is not allowed: it must be {describe(field)}")


def describe(field: dataclasses.Field[Any]) -> str:
    """What a field accepts, in words: "an integer >= 1"."""
    limits = field.metadata
    name = field.type if isinstance(field.type, str) else getattr(field.type, "__name__", str(field.type))
    name = str(field.type) if get_origin(field.type) else name
    null = " or null" if name.endswith(" | None") else ""
    if limits.get("choices"):
        return "one of " + ", ".join(map(str, limits["choices"])) + null
    words = WORDS.get(name.removesuffix(" | None"), name.removesuffix(" | None"))
    bounds = [f"{sign} {limits[key]:{'' if isinstance(limits[key], int) else 'g'}}"
              for key, sign in (("ge", ">="), ("gt", ">"), ("le", "<=")) if limits.get(key) is not None]  # fmt: skip
    if words in ("text", "a list of texts"):
        bounds.append("that is not empty" if words == "text" else "that are not empty")
    return ("0 or " if limits.get("zero") else "") + " ".join([words, " and ".join(bounds)]).strip() + null


def unknown(name: str, available: Iterable[str], kind: str) -> ConfigError:
    """The error "X is not a KIND. Did you mean Y? Available: ...", with Y among those available if one is close."""
    available = sorted(available)
    close = difflib.get_close_matches(name[:SHOWN], available, n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    return ConfigError(f"{shown(name)} is not a {kind}.{hint} Available: {', '.join(available) or 'none'}.")


def explain(error: BaseException, known_keys: Iterable[str], overrides: Sequence[str] = ()) -> str:
    """A mistake that Hydra or OmegaConf found while composing these overrides, as one sentence."""
    text = str(error)
    if found := re.search(r"ConfigError raised while resolving interpolation: (.*)", text):  # by one of our resolvers
        return found[1]
    if found := re.search(r"Could not override '([^']+)'|Key '([^']+)' is not in struct", text):
        key = found[1] or found[2]
        group = key.rpartition(".")[0]
        what = f"setting of the chosen {group}" if group else "setting"
        return str(unknown(key, (known for known in known_keys if known.rpartition(".")[0] == group), what))
    if found := re.search(r"Could not find '([^']+)/([^'/]+)'\s+Available options in '[^']+':\n((?:\t.*\n?)*)", text):
        group, option, options = found[1], found[2], found[3].split()
        return str(unknown(f"{group}={option}", (f"{group}={name}" for name in options), "choice"))
    if found := re.search(r"Could not load '([^']+)/([^'/]+)'", text):  # of a list of options
        return f"{found[1]}={found[2]} is not a choice (see python -m specbench --help)"
    if override := getattr(error, "override", None):
        key, _, value = str(override).partition("=")
        hint = f"; a value with = in it needs quotes: '{key}=\"{value}\"'" if "=" in value else ""
        return f"{shown(override)} is not an override that Hydra can read: {first_line(error)}{hint}"
    overrides = [override for override in overrides if not override.startswith("-")]
    where = getattr(error, "full_key", None) or "hydra."
    if where.startswith("hydra.") and overrides:  # a folder's name holds all overrides
        where = ("one of " if len(overrides) > 1 else "") + shown(", ".join(overrides))
    return f"{where} is not possible: {first_line(error)} (see python -m specbench --help)"


def comes_from(function: Callable[..., Any], error: BaseException) -> bool:
    """Whether the error was raised while the function ran; Hydra's own composition fails with errors of any class."""
    return any(frame.f_code is function.__code__ for frame, _ in traceback.walk_tb(error.__traceback__))


def stop(sentence: str, code: int) -> NoReturn:
    """Prints one sentence on standard error, wrapped if that is a terminal; ends the program with this code."""
    line = visible(" ".join(sentence.split()))
    if len(line) > LONGEST_SENTENCE:
        line = f"{line[: LONGEST_SENTENCE // 2]} ... {line[-LONGEST_SENTENCE // 2 :]}"
    line = f"specbench: {line}"
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns
        line = textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)
    print(line, file=sys.stderr)
    sys.exit(code)


@contextmanager
def answering() -> Iterator[None]:
    """The body of a command: a ConfigError becomes one sentence and exit code 2. Where what reads the output is gone,
    as after `| head -1`, the command ends without a word, with the exit code of a program that SIGPIPE ends."""
    try:
        yield
        sys.stdout.flush()
    except ConfigError as error:
        stop(str(error), 2)
    except BrokenPipeError:
        with suppress(OSError, ValueError):  # so that Python's own flush at the end has somewhere to go
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
