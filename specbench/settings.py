"""Settings of a component: a pydantic model beside its class holds types and bounds, `conf/` holds the values.

class Settings(BaseSettings):
    window: int = Field(ge=1, le=10**7)
    order: Literal["fixed", "cyclic"] = "fixed"
"""

import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import hydra
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from specbench.errors import ConfigError, causes, first_line, installing, shown, unknown

log = logging.getLogger(__name__)
SMALLEST, LARGEST = 1e-30, 1e30  # of a float that is not 0: float32 holds it, its square and its inverse
LARGEST_INTEGER = 2**63 - 1
MOST_BEAMS = 64  # w of a beam search
LARGEST_GAMMA = 1000  # guesses of a draft, one after another
LARGEST_SEED = 2**32 - 1  # of numpy; torch takes larger ones
UNLIMITED_CONTEXT = 2**31 - 1  # tokens: of a model whose positions have no end, such as T5
SHIPPED = Path(__file__).resolve().parent / "shipped"  # the models that come with the package
PACKAGE = "package:"
# Types and bounds of a JSON schema.
WORDS = {"integer": "an integer", "number": "a number", "boolean": "true or false", "string": "a text", "null": "null",
         "object": "a mapping of keys to values", None: "any value"}  # fmt: skip
SIGNS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


def _zero_or_more_than_a_thousandth(value: float) -> float:
    if value != 0 and not 1e-3 <= value <= 1e3:
        raise ValueError("0 or a number >= 0.001 and <= 1000")
    return value


# Bounds within which float32 logits stay finite and keep their order.
Temperature = Annotated[float, AfterValidator(_zero_or_more_than_a_thousandth)]
TopK = Annotated[int, Field(ge=0, le=10**9)]
TopP = Annotated[float, Field(ge=1e-6, le=1)]
Lenience = Annotated[float, Field(ge=1e-6, le=1)]  # of p / l


def place_of(path: str) -> str:
    """A path as it is; `shipped:NAME` is a file or folder that comes with specbench, `package:NAME/FILE` a file of an
    installed Python package, which is not imported."""
    if path.startswith(PACKAGE):
        name, _, file = path.removeprefix(PACKAGE).partition("/")
        found = find_spec(name) if name.isidentifier() else None
        folders = found and found.submodule_search_locations
        return str(Path(folders[0], file)) if folders else path
    return str(SHIPPED / path.removeprefix("shipped:")) if path.startswith("shipped:") else path


def hub_or_package(hub_id: str, file: str) -> str:
    """`package:FILE` if its package is installed and the local cache lacks the hub id's weights; else the hub id."""
    from huggingface_hub import try_to_load_from_cache

    package = f"{PACKAGE}{file}"
    cached = isinstance(try_to_load_from_cache(hub_id, "model.safetensors"), str)
    return package if place_of(package) != package and not cached else hub_id


class BaseSettings(BaseModel):
    """Base class of every component's `Settings`, and of the run's own scalars."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, coerce_numbers_to_str=True, protected_namespaces=())

    def check(self, prefix: str) -> None:
        """Checks what bounds of single fields cannot express. `prefix` is the group, "drafter.". Raises ConfigError."""

    def models(self) -> "Sequence[BaseSettings]":
        """Settings of the checkpoints that the component loads, for the memory estimate."""
        return ()

    def own_bytes(self) -> int:
        """Bytes of the weights that the component reads from a checkpoint beside `models`; 0 of hub ids."""
        return 0


class Component:
    """Base class of every part that a configuration chooses: drafters, verifiers, policies, executors, caches, ..."""

    Settings: ClassVar[Any] = BaseSettings  # or a nested subclass of it

    @classmethod
    def from_settings(cls, settings: Any, *arguments: Any, **more: Any) -> Any:
        """Builds the part from its settings and what its group is given besides: by default these are the arguments of
        the constructor, those of the group first. Raises ConfigError."""
        return cls(*arguments, **vars(settings), **more)


Schema = TypeVar("Schema", bound=BaseSettings)


def validate(schema: type[Schema], node: DictConfig, prefix: str = "") -> Schema:
    """The node of a group ("drafter." is its prefix) as an instance of the schema. Raises ConfigError."""
    fields = schema.model_fields
    values: dict[str, Any] = {}
    for name in (str(name) for name in node if name != "_target_"):
        key = f"{prefix}{name}"
        if name not in fields:
            raise unknown(key, (f"{prefix}{field}" for field in fields), "setting")
        value = resolved(node, name, key)
        refuse_odd_values(key, value)
        if value != MISSING:
            values[name] = value
    try:
        settings = schema.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_sentence(error, schema, values, prefix)) from error
    for name, value in values.items():
        if isinstance(value, bool) and not isinstance(vars(settings)[name], bool):  # pydantic takes true for 1
            raise ConfigError(f"{prefix}{name}={value} is not allowed: it must be {describe(schema, name)}")
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


def refuse_odd_values(key: str, value: Any) -> None:
    """Raises ConfigError for a number, at any depth, not finite or no float32, or a text, empty or not UTF-8."""
    if isinstance(value, dict | list):
        for name, entry in value.items() if isinstance(value, dict) else enumerate(value):
            refuse_odd_values(f"{key}.{shown(name)}", entry)
    elif isinstance(value, float) and value != 0 and not SMALLEST <= abs(value) <= LARGEST:
        raise ConfigError(f"{key}={value} is not allowed: it must be 0 or a number from {SMALLEST} to {LARGEST}")
    elif isinstance(value, int) and abs(value) > LARGEST_INTEGER:
        raise ConfigError(f"{key}={shown(value)} is not allowed: it must be an integer below 2^63")
    elif isinstance(value, str) and (not value or any(c == "\0" or "\ud800" <= c <= "\udfff" for c in value)):
        raise ConfigError(f"{key}={shown(value)} is not allowed: it must be a text that is not empty")


def _sentence(error: ValidationError, schema: type[BaseModel], values: Any, prefix: str) -> str:
    """What pydantic refused first, with the key, the value and what is allowed."""
    first = error.errors()[0]
    name = str(first["loc"][0])
    key, meaning = f"{prefix}{name}", schema.model_fields[name].description
    if first["type"] == "missing":
        return f"{key} is not set: give {meaning or 'a value'} with {key}=..."
    allowed = meaning if first["type"] == "string_pattern_mismatch" else describe(schema, name)
    if first["type"] == "value_error":
        allowed = first["msg"].removeprefix("Value error, ")
    return f"{key}={shown(values[name])} is not allowed: it must be {allowed}"


def describe(schema: type[BaseModel], name: str) -> str:
    """What a setting accepts, in words: "an integer >= 1 or null"."""
    return _in_words(schema.model_json_schema()["properties"][name])


def _in_words(node: Mapping[str, Any]) -> str:
    """What a part of a JSON schema accepts."""
    if "anyOf" in node:
        return " or ".join(map(_in_words, node["anyOf"]))
    if "enum" in node or "const" in node:
        choices = node.get("enum", [node.get("const")])
        return f"one of {', '.join(str(each).lower() if isinstance(each, bool) else each for each in choices)}"
    if node.get("type") == "array":
        return f"a list, each entry {_in_words(node['items'])}"
    found = [(sign, node[name]) for name, sign in SIGNS.items() if name in node]
    bounds = [f"{sign} {bound:g}" if isinstance(bound, float) else f"{sign} {bound}" for sign, bound in found]
    return f"{WORDS[node.get('type')]} {' and '.join(bounds)}".strip()


@dataclass(frozen=True)
class Choice:
    """The option that was chosen in a group: its name, class and checked settings."""

    name: str
    kind: Any  # a subclass of the group's base class
    settings: Any  # an instance of kind.Settings

    def build(self, *arguments: Any) -> Any:
        """The component, from its settings and the further arguments of `from_settings`. Raises ConfigError."""
        try:
            return self.kind.from_settings(self.settings, *arguments)
        except TypeError as error:
            log.info("%s could not be built", self.name, exc_info=True)
            named = f"{self.kind.__module__}.{self.kind.__qualname__}"
            said = f"{named} cannot be built from its settings ({first_line(error)}), see run.log"
            raise ConfigError(said) from error


def chosen(node: Any, key: str, base: type[Any], name: str | None = None) -> Choice:
    """The class that a node names with `_target_`, a subclass of `base` that can be built, and its settings. `key` is
    where the node stands. Importing the class's module is all that runs of it. Raises ConfigError."""
    how = f"choose one with {key}=NAME"
    node = OmegaConf.create(node) if isinstance(node, dict) else node
    if not isinstance(node, DictConfig) or node._is_none():
        raise ConfigError(f"{key} is not set: {how}")
    target = resolved(node, "_target_", f"{key}._target_") if "_target_" in node else None
    if target is None:
        raise ConfigError(f"{key}._target_ is not set: {how}")
    named = f"{key}._target_={shown(target)} is not allowed"
    if not isinstance(target, str):
        raise ConfigError(f"{named}: it must be the name of a class, MODULE.CLASS")
    try:
        kind: Any = hydra.utils.get_class(target)
    except (Exception, SystemExit) as error:
        raise _not_imported(key, target, error.__cause__ or error) from error
    if not issubclass(kind, base) or inspect.isabstract(kind):
        raise ConfigError(f"{named}: it must be a subclass of {base.__name__} that can be built, {how}")
    if not issubclass(kind.Settings, BaseSettings):
        raise ConfigError(f"{named}: its Settings must be derived from BaseSettings")
    return Choice(name or kind.__name__, kind, validate(kind.Settings, node, f"{key}."))


def _not_imported(key: str, target: str, cause: BaseException) -> ConfigError:
    """Why a class cannot be imported: there is none, or its module ends with an error, which is named."""
    absent = isinstance(cause, ModuleNotFoundError) and f"{target}.".startswith(f"{cause.name}.")
    absent = absent or (isinstance(cause, AttributeError) and cause.name in target.split("."))
    if absent or isinstance(cause, ValueError):  # which Hydra raises for what is no class
        return ConfigError(
            f"{key}._target_={shown(target)} is not allowed: no such class can be imported ({first_line(cause)})"
        )
    mend = f": if a package is missing or does not fit, {installing()}" if target.startswith("specbench.") else ""
    return ConfigError(f"{key} is not possible: {shown(target)} cannot be imported ({causes(cause)}){mend}")
