"""Base class of every part that a configuration chooses."""

from typing import Any, ClassVar


class Component:
    """Base class of drafters, verifiers, policies, executors, caches, peers, loggers, data and metrics.

    A subclass has its schema beside it, as a nested dataclass `Settings`, and is built by `from_settings`, whose
    arguments the base class of its group declares.
    """

    Settings: ClassVar[Any] = None  # a subclass of `specbench.settings.BaseSettings`; None without settings

    @classmethod
    def refuses(cls, settings: Any, run: Any) -> str | None:
        """Why this choice is not possible with the other choices of the run, its `Selections`, or None if it is. The
        answer completes the sentence "verifier=block is not possible ...", and ends with what can be chosen instead, as
        in "with drafter=tree: choose verifier=iterative"."""
        return None
