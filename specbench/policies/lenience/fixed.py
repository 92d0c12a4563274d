"""One lenience for the whole run (A.5): the setting `lenience`."""

from collections.abc import Callable
from typing import Any

from specbench.decoding.verifier import Verifier
from specbench.policies.lenience.base import LeniencePolicy


class FixedLenience(LeniencePolicy):
    """Uses the verifier of this lenience in every round."""

    def __init__(self, lenience: float):
        self.lenience = lenience

    @classmethod
    def from_settings(cls, settings: Any, lenience: float) -> "FixedLenience":
        return cls(lenience)

    def verifier(self, with_lenience: Callable[[float], Verifier]) -> Verifier:
        return with_lenience(self.lenience)
