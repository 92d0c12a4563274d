"""Base class of every part that a configuration chooses: its settings, and which other choices it refuses."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from specbench.settings import BaseSettings


@dataclass(frozen=True)
class Choice:
    """The option that was chosen in one group: its name, class and validated settings."""

    name: str
    kind: Any  # a subclass of the group's base class
    settings: Any  # an instance of kind.Settings


@dataclass(frozen=True)
class Choices:
    """The options that were chosen in all groups, before anything is built."""

    groups: Mapping[str, Choice]
    temperature: float
    lenience: float  # the lowest of any round
    device: str
    batch_size: int

    def __getitem__(self, group: str) -> Choice:
        return self.groups[group]


class Component:
    """Base class of drafters, verifiers, policies, executors, caches, peers, loggers, data and metrics.

    A subclass has its schema beside it, as a nested dataclass `Settings`, and is built by `from_settings`, whose
    arguments the base class of its group declares.
    """

    Settings: ClassVar[type[BaseSettings]] = BaseSettings

    @classmethod
    def refuses(cls, settings: Any, run: Choices) -> str | None:
        """Why this choice is not possible with the other choices of the run, or None if it is. The answer completes the
        sentence "verifier=block is not possible ...", and ends with what can be chosen instead, as in "with
        drafter=tree: choose verifier=iterative"."""
        return None
