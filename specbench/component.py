"""Base class of every part that a configuration chooses: its settings, and which other choices it refuses."""

import dataclasses
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import hydra
from omegaconf import DictConfig, OmegaConf

from specbench.errors import ConfigError, first_line, shown
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

    @property
    def workers(self) -> int:
        """Processes among which the prompts of the run are split."""
        return int(self.scalars.get("workers", 1))


class Component:
    """Base class of drafters, verifiers, policies, executors, caches, peers, loggers, data and metrics.

    A subclass has its schema beside it, as a nested dataclass `Settings`, and is built by `from_settings`, whose
    arguments the base class of its group declares.
    """

    Settings: ClassVar[type[BaseSettings]] = BaseSettings

    @classmethod
    def refuses(cls, settings: Any, run: Selections) -> str | None:
        """Why this choice is not possible with the other choices of the run, or None if it is. The answer completes the
        sentence "verifier=block is not possible ...", and ends with what can be chosen instead, as in "with
        drafter=tree: choose verifier=iterative"."""
        return None


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
        raise ConfigError(f"{named}: no such class can be imported ({first_line(error)})") from error
    if not issubclass(kind, base):
        raise ConfigError(f"{named}: it must be a subclass of {base.__name__}")
    if inspect.isabstract(kind):
        raise ConfigError(f"{named}: it is the base class of what can be chosen, choose one with {how}")
    schema: Any = kind.Settings
    if not (isinstance(schema, type) and dataclasses.is_dataclass(schema) and issubclass(schema, base.Settings)):
        raise ConfigError(f"{named}: its Settings must be a dataclass derived from {base.Settings.__name__}")
    return kind, validate(schema, node, f"{key}.")


def nested(node: Any, key: str, base: type[Component]) -> tuple[Any, Any]:
    """The class and the validated settings of a component inside another one's settings. Raises ConfigError."""
    return chosen_class(OmegaConf.create(node) if isinstance(node, dict) else None, key, base, f"{key}._target_=CLASS")
