"""What every part that a configuration chooses has in common: settings, and a say in what it can be paired with."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from specbench.settings import BaseSettings


@dataclass(frozen=True)
class Choice:
    """What was chosen in one group: the name of the option, its class and its validated settings."""

    name: str
    kind: Any  # a subclass of the group's base class
    settings: Any  # an instance of kind.Settings


@dataclass(frozen=True)
class Choices:
    """Everything that a run is to be made of, before any of it is built."""

    groups: Mapping[str, Choice]
    temperature: float
    lenience: float  # the lowest that any round may have
    device: str

    def __getitem__(self, group: str) -> Choice:
        return self.groups[group]


class Component:
    """Base class of drafters, verifiers, policies, executors, caches, peers, loggers, data and metrics.

    A subclass has its schema beside it, as a nested dataclass `Settings`, and is built by `from_settings`,
    whose arguments the base class of its group declares.
    """

    Settings: ClassVar[type[BaseSettings]] = BaseSettings

    @classmethod
    def refuses(cls, settings: Any, run: Choices) -> str | None:
        """Why this choice is not possible in such a run, or None if it is. The answer completes the
        sentence "verifier=block is not possible ...", and ends with what can be chosen instead."""
        return None
