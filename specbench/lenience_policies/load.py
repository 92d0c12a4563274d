"""More lenience while requests wait: speed for exactness, only when somebody pays for the delay."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from specbench.context import Context
from specbench.decoding.protocols import Noise, Verifier
from specbench.decoding.state import Draft, State, Verdict
from specbench.settings import ConfigError, setting


class LoadLenience:
    """Goes down `levels` by one for every `step` requests that wait, and up again as they get rows."""

    @dataclass
    class Settings:
        levels: list[float] = setting()
        step: int = setting(ge=1)

        def check(self, prefix: str) -> None:
            falling = all(a > b for a, b in zip(self.levels, self.levels[1:], strict=False))
            if not self.levels or not falling or not 0 < self.levels[-1] <= self.levels[0] <= 1:
                raise ConfigError(f"{prefix}levels={self.levels} is not allowed: falling numbers in (0, 1]")

    def __init__(self, settings: Settings, context: Context):
        self.levels, self.step, self.lowest = settings.levels, settings.step, settings.levels[-1]

    def verifier(self, with_lenience: Callable[[float], Verifier]) -> Verifier:
        return VerifierUnderLoad([with_lenience(level) for level in self.levels], self.step)


class VerifierUnderLoad:
    """One verifier per level, so that compiled code of each is found again; `under` picks one."""

    def __init__(self, levels: list[Verifier], step: int):
        self.levels, self.step = levels, step
        self.lossless = all(level.lossless for level in levels)
        self.lenience = levels[0].lenience
        self.judges_by_law = levels[0].judges_by_law

    def under(self, state: State) -> Verifier:
        """By the number of requests that wait now."""
        return self.levels[min(state.waiting // self.step, len(self.levels) - 1)]

    def accept(self, p: Tensor, draft: Draft, noise: Noise) -> Verdict:
        """Without load."""
        return self.levels[0].accept(p, draft, noise)

    def beta(self, p: Tensor, draft: Draft) -> Tensor:
        """Without load."""
        return self.levels[0].beta(p, draft)
