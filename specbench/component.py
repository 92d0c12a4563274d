"""The options that a configuration chooses: their classes and their validated settings."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf

from specbench.decoding.component import Component
from specbench.errors import ConfigError, causes, first_line, installing, shown
from specbench.settings import BaseSettings, resolved, validate


@dataclass(frozen=True)
class Selection:
    """The option that was chosen in one group: its name, class and validated settings."""

    name: str
    kind: Any  # a subclass of the group's base class
    settings: Any  # an instance of kind.Settings


@dataclass(frozen=True)
class Selections:
    """The options that were chosen in all groups, before anything is built."""

    groups: Mapping[str, Selection]
    temperature: float
    lenience: float  # the lowest of any round
    device: str
    scalars: Mapping[str, Any]  # the run's, by key

    def __getitem__(self, group: str) -> Selection:
        return self.groups[group]

    @property
    def batch_size(self) -> int:
        return int(self.scalars["batch_size"])


def chosen_class(node: Any, key: str, base: type[Component], how: str) -> tuple[Any, Any]:
    """The class that a node names with `_target_`, a subclass of `base` that can be built, and its validated settings.
    `how` says how one is chosen. Importing the class's module is all that runs of it. Raises ConfigError."""
    if not isinstance(node, DictConfig) or node._is_none():
        raise ConfigError(f"{key} is not set: choose one with {how}")
    target = resolved(node, "_target_", f"{key}._target_") if "_target_" in node else None
    if target is None:
        raise ConfigError(f"{key}._target_ is not set: choose one with {how}")
    named = f"{key}._target_={shown(target)} is not allowed"
    if not isinstance(target, str):
        raise ConfigError(f"{named}: it must be the name of a class, MODULE.CLASS")
    try:
        kind: Any = hydra.utils.get_class(target)
    except (Exception, SystemExit) as error:
        raise _not_imported(key, target, error.__cause__ or error) from error
    if not issubclass(kind, base):
        raise ConfigError(f"{named}: it must be a subclass of {base.__name__}")
    if inspect.isabstract(kind):
        raise ConfigError(f"{named}: it is the base class of what can be chosen, choose one with {how}")
    schema, above = kind.Settings or BaseSettings, base.Settings or BaseSettings
    if not (isinstance(schema, type) and issubclass(schema, above)):
        raise ConfigError(f"{named}: its Settings must be a class derived from {above.__name__}")
    return kind, validate(schema, node, f"{key}.")


def _not_imported(key: str, target: str, cause: BaseException) -> ConfigError:
    """Why a class cannot be imported: there is none, or its module ends with an error, which is named."""
    absent = isinstance(cause, ModuleNotFoundError) and f"{target}.".startswith(f"{cause.name}.")
    absent = absent or (isinstance(cause, AttributeError) and cause.name in target.split("."))
    if absent or isinstance(cause, ValueError):  # which Hydra raises for what is no class
        return ConfigError(f"{key}._target_={shown(target)} is not allowed: no such class can be imported "
                           f"({first_line(cause)})")  # fmt: skip
    mend = f": if a package is missing or does not fit, {installing()}" if target.startswith("specbench.") else ""
    return ConfigError(f"{key} is not possible: {shown(target)} cannot be imported ({causes(cause)}){mend}")


def nested(node: Any, key: str, base: type[Component]) -> tuple[Any, Any]:
    """The class and the validated settings of a component inside another one's settings. Raises ConfigError."""
    return chosen_class(OmegaConf.create(node) if isinstance(node, dict) else None, key, base, f"{key}._target_=CLASS")
