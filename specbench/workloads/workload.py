"""Base class of workloads: when requests arrive."""

from abc import ABC, abstractmethod
from typing import Any

from specbench.component import Component


class Workload(Component, ABC):
    """The arrival times of requests. `over_time` says whether requests arrive while others are decoded."""

    over_time: bool = False

    @classmethod
    def from_settings(cls, settings: Any, seed: int) -> "Workload":
        """Builds the workload; by default it has no settings."""
        return cls()

    @abstractmethod
    def arrivals(self, requests: int) -> list[float] | None:
        """The second, from the start, at which each request arrives, in order; None if all are there at once."""
