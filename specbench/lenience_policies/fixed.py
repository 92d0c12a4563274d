"""One lenience for the whole run: the setting `lenience`."""

from collections.abc import Callable
from dataclasses import dataclass

from specbench.context import Context
from specbench.decoding.protocols import Verifier


class FixedLenience:
    """The verifier as it is."""

    @dataclass
    class Settings:
        pass

    def __init__(self, settings: Settings, context: Context):
        self.lenience = self.lowest = context.lenience

    def verifier(self, with_lenience: Callable[[float], Verifier]) -> Verifier:
        return with_lenience(self.lenience)
