"""What a workload is: when requests come."""

from abc import ABC, abstractmethod
from typing import Any

from specbench.component import Component


class Workload(Component, ABC):
    """`over_time` says whether requests arrive while others are decoded."""

    over_time: bool = False

    @classmethod
    def from_settings(cls, settings: Any, seed: int) -> "Workload":
        """By default it has no settings."""
        return cls()

    @abstractmethod
    def arrivals(self, requests: int) -> list[float] | None:
        """Seconds from the start at which each request comes, in order; None if all are there at once."""
