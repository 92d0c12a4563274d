"""Base class of every part that a configuration chooses."""

from typing import Any, ClassVar


class Component:
    """Base class of drafters, verifiers, policies, executors, caches, peers, loggers, data and metrics."""

    # A nested dataclass, subclass of `specbench.settings.BaseSettings`, which `from_settings` takes; None without any.
    Settings: ClassVar[Any] = None

    @classmethod
    def refuses(cls, settings: Any, run: Any) -> str | None:
        """Why this choice is not possible with the run's other `Selections`, or None. It completes the sentence
        "verifier=block is not possible ...", as in "with drafter=tree: choose verifier=iterative"."""
        return None
