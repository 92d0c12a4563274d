"""Base class of every part that a configuration chooses."""

from typing import Any, ClassVar


class Component:
    """Base class of drafters, verifiers, policies, executors, caches, peers, loggers, data and metrics."""

    # A nested subclass of `specbench.settings.BaseSettings`, which `from_settings` takes; None without any.
    Settings: ClassVar[Any] = None
