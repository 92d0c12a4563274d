"""Typed, bounded settings: the base of a component's `Settings` dataclass, and their checks and errors.

Types and bounds stand in code beside the class that uses them, values in `conf/`.
"""

import dataclasses
import difflib
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import hydra
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException


class ConfigError(Exception):
    """A mistake of the user's: one sentence that names the key, the value and what is allowed."""


@dataclasses.dataclass
class BaseSettings:
    """Base class of every schema: a dataclass whose fields are made by `setting`."""

    def check(self, prefix: str) -> None:
        """Checks what bounds of single fields cannot express. `prefix` is the group, "drafter.". Raises ConfigError."""

    def models(self) -> "Sequence[BaseSettings]":
        """Settings of the checkpoints that the component loads, for the memory estimate."""
        return ()

    def sources(self) -> Mapping[str, str]:
        """Versions of what the component reads besides its settings, by the setting that names it: a finished run is
        used again only if they are what they were. `specbench.identity` finds them."""
        return {}


def setting(*, ge: float | None = None, gt: float | None = None, le: float | None = None,
            choices: Iterable[Any] | None = None, required: str | None = None,
            default: Any = MISSING) -> Any:  # fmt: skip
    """A field of a Settings dataclass with bounds. `required` says what a missing value should be."""
    return dataclasses.field(
        default=default,
        metadata={"ge": ge, "gt": gt, "le": le, "choices": choices and tuple(choices), "required": required},
    )


Schema = TypeVar("Schema", bound=BaseSettings)


def validate(schema: type[Schema], node: DictConfig, prefix: str = "") -> Schema:
    """The node as an instance of the schema. `prefix` is the group, "drafter.".

    Raises ConfigError for an unknown key, a wrong type, a value out of bounds, or what `check` refuses.
    """
    values: Any = OmegaConf.to_container(node, resolve=True)
    values.pop("_target_", None)
    fields = {field.name: field for field in dataclasses.fields(schema)}
    for name in values:
        if name not in fields:
            raise unknown(f"{prefix}{name}", (f"{prefix}{field}" for field in fields), "setting")
    try:
        typed = OmegaConf.merge(OmegaConf.structured(schema), values)
        settings: Schema = OmegaConf.to_object(typed)  # type: ignore[assignment]
    except MissingMandatoryValue as error:
        name = (error.full_key or "").split(".")[-1]
        what = fields[name].metadata.get("required") or "a value"
        raise ConfigError(f"{prefix}{name} is not set: give {what} with {prefix}{name}=...") from error
    except ConfigKeyError as error:
        raise ConfigError(f"{prefix}{error.full_key} is not a setting") from error
    except OmegaConfBaseException as error:
        name = (error.full_key or "").split(".")[-1].split("[")[0]
        allowed = describe(fields[name])
        raise ConfigError(f"{prefix}{name}={values.get(name)} is not allowed: it must be {allowed}") from error
    for field in fields.values():
        check_bounds(f"{prefix}{field.name}", getattr(settings, field.name), field)
    settings.check(prefix)
    return settings


def nested(node: dict[str, Any], key: str) -> tuple[Any, Any]:
    """The class and the validated settings of a component inside another one's settings. Raises ConfigError."""
    kind: Any = hydra.utils.get_class(node["_target_"])
    return kind, validate(kind.Settings, OmegaConf.create(node), f"{key}.")


def check_bounds(key: str, value: Any, field: dataclasses.Field[Any]) -> None:
    """Raises ConfigError if the value, or an entry of a list, is outside the field's bounds."""
    limits = field.metadata
    if isinstance(value, bool) and field.type not in (bool, Any, "bool"):
        raise ConfigError(f"{key}={value} is not allowed: it must be {describe(field)}")
    if isinstance(value, list):
        for entry in value:
            check_bounds(key, entry, field)
        return
    if value is None or (isinstance(value, (str, bool)) and not limits.get("choices")):
        return
    too_low = (limits.get("ge") is not None and not value >= limits["ge"]) or (
        limits.get("gt") is not None and not value > limits["gt"]
    )
    too_high = limits.get("le") is not None and not value <= limits["le"]
    if too_low or too_high or (limits.get("choices") and value not in limits["choices"]):
        raise ConfigError(f"{key}={value} is not allowed: it must be {describe(field)}")


def describe(field: dataclasses.Field[Any]) -> str:
    """What a field accepts, in words: "an integer >= 1"."""
    limits = field.metadata
    if limits.get("choices"):
        return "one of " + ", ".join(map(str, limits["choices"]))
    name = field.type.__name__ if isinstance(field.type, type) else str(field.type)
    words = {"int": "an integer", "float": "a number", "bool": "true or false", "str": "text"}.get(name, name)
    bounds = [f"{sign} {limits[key]:g}" for key, sign in (("ge", ">="), ("gt", ">"), ("le", "<="))
              if limits.get(key) is not None]  # fmt: skip
    return " ".join([words, " and ".join(bounds)]).strip()


def unknown(name: str, available: Iterable[str], kind: str) -> ConfigError:
    """The error "X is not a KIND. Did you mean Y? Available: ...", with Y among those available if one is close."""
    available = sorted(available)
    close = difflib.get_close_matches(name, available, n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    return ConfigError(f"{name} is not a {kind}.{hint} Available: {', '.join(available) or 'none'}.")


def explain(error: Exception, known_keys: Iterable[str]) -> str:
    """A mistake that Hydra or OmegaConf found while composing, as one sentence."""
    text = str(error)
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
    first = next((line for line in text.splitlines() if line.strip()), type(error).__name__).strip()
    if override := getattr(error, "override", None):
        key, _, value = str(override).partition("=")
        hint = f"; a value with = in it needs quotes: '{key}=\"{value}\"'" if "=" in value else ""
        return f"{override} is not an override that Hydra can read: {first}{hint}"
    return f"{first} (see python -m specbench --help)"


def stop(sentence: str, code: int) -> NoReturn:
    """Prints one sentence on standard error and ends the program with this exit code."""
    print("specbench:", " ".join(sentence.split()), file=sys.stderr)
    sys.exit(code)
