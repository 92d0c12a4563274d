"""Base class of lenience policies: how lenient the verifier is in each round (A.5)."""

from collections.abc import Callable
from typing import Any

from specbench.decoding.component import Component
from specbench.decoding.verifier import Verifier


class LeniencePolicy(Component):
    """Makes the run's verifier out of verifiers of constant lenience: by default one of `lenience`, the run's setting,
    in (0, 1]."""

    def __init__(self, lenience: float):
        self.lenience = lenience

    @classmethod
    def from_settings(cls, settings: Any, lenience: float) -> "LeniencePolicy":
        return cls(lenience)

    @classmethod
    def lowest(cls, settings: Any, lenience: float) -> float:
        """The lowest lenience that any round may have."""
        return lenience

    def verifier(self, with_lenience: Callable[[float], Verifier]) -> Verifier:
        """The run's verifier; with_lenience(l) makes a verifier of constant lenience l."""
        return with_lenience(self.lenience)
