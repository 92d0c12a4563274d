"""Lenience (A.5) that follows the load: a run is less exact while requests wait."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from pydantic import Field

from specbench.errors import ConfigError, shown
from specbench.policies.base import LeniencePolicy
from specbench.settings import BaseSettings, Lenience
from specbench.verifiers.base import Verifier

MOST_LEVELS = 16  # each is warmed up


class LoadLenience(LeniencePolicy):
    """The lenience of a round is levels[requests without a row // step], or the last level."""

    class Settings(BaseSettings):
        levels: list[Lenience]
        step: int = Field(ge=1, le=10**6)

        def check(self, prefix: str) -> None:
            falling = all(a > b for a, b in pairwise(self.levels))
            if not falling or not 0 < len(self.levels) <= MOST_LEVELS:
                raise ConfigError(
                    f"{prefix}levels={shown(self.levels)} is not allowed: it must be 1 to {MOST_LEVELS} falling numbers"
                )

    def __init__(self, lenience: float, levels: Sequence[float], step: int):
        super().__init__(lenience)
        self.levels, self.step = levels, step

    @classmethod
    def lowest(cls, settings: Any, lenience: float) -> float:
        return float(min(settings.levels))

    def verifier(self, with_lenience: Callable[[float], Verifier]) -> Verifier:
        """One verifier per level, so that compiled code of each is reused: the first one picks that of a round."""
        first, *others = (with_lenience(level) for level in self.levels)
        first.levels, first.step = (first, *others), self.step
        first.lossless = all(verifier.lossless for verifier in first.levels)
        return first
