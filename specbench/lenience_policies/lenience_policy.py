"""What a lenience policy is: how lenient the verifier is, round by round (A.5)."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from specbench.component import Component
from specbench.decoding.verifier import Verifier


class LeniencePolicy(Component, ABC):
    """Turns verifiers of a constant lenience into the one that a run uses."""

    @classmethod
    @abstractmethod
    def from_settings(cls, settings: Any, lenience: float) -> "LeniencePolicy":
        """`lenience` is the run's scalar, in (0, 1]."""

    @classmethod
    def lowest(cls, settings: Any, lenience: float) -> float:
        """The lowest lenience that a round may have."""
        return lenience

    @abstractmethod
    def verifier(self, with_lenience: Callable[[float], Verifier]) -> Verifier:
        """The run's verifier, made of verifiers of a constant lenience."""
