"""Base classes of gamma policies, how many tokens to draft in each round (section 3.5), and of lenience policies, how
lenient the verifier is in it (A.5); and the paper's own, which are constant."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from pydantic import Field
from torch import Tensor

from specbench.decoding.state import State
from specbench.settings import LARGEST_GAMMA, BaseSettings, Component
from specbench.verifiers.base import Verifier

Signal = Callable[[Tensor, Tensor], Tensor]


@dataclass
class Costs:
    """Measured seconds of a call by its drafter steps, and of guesses how many were accepted."""

    calls: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    acceptance: tuple[float, int] = (0.0, 0)  # sum of betas, tested positions

    @property
    def alpha(self) -> float:
        """Mean beta so far; 1/2 before there is one."""
        total, tested = self.acceptance
        return (total + 0.5) / (tested + 1)

    def seconds(self, largest: int) -> npt.NDArray[np.float64]:
        """Median seconds of a call with 0 .. largest drafter steps, [largest + 1], linear between measured numbers."""
        known = sorted(self.calls)
        medians = [float(np.median(self.calls[steps])) for steps in known]
        return np.interp(np.arange(largest + 1), known, medians)


class GammaPolicy(Component):
    """Chooses gamma for every row and round. `largest` is the most tokens that it drafts. `widths` are the draft
    lengths that it uses, to which executors with fixed shapes pad. `constant` is gamma if it never changes, else None.
    Unless it is constant, what it knows may depend on guesses that were discarded, so after each round the decoder
    renews the noise of the next guesses."""

    calibrated: ClassVar[bool] = False  # whether it needs `calibrate`
    watches: ClassVar[bool] = False  # whether it may stop a draft after any guess
    asks: ClassVar[bool] = False  # whether its signal is the drafter's own estimate of the next guess's acceptance

    largest: int
    widths: tuple[int, ...]
    constant: int | None = None
    whole: bool = False  # whether all rounds have equally many guesses: one captured call may be a whole round
    # Maps q [B, V] (before argmax at temperature 0) and the guesses [B] to one number per row, [B]. If it `asks`, in
    # front of each guess: the logit [B] of the drafter's estimate, and the tokens before the guess [B].
    signal: Signal | None = None

    @property
    def stop(self) -> "GammaPolicy | None":
        """Itself if it decides after each guess whether to draft another, else None."""
        return None if self.signal is None else self

    def calibrate(self, costs: Costs) -> None:
        """Receives the measured seconds of a round by gamma, and a first mean beta."""

    def next_gamma(self, state: State) -> list[int]:
        """gamma of the next round, one number per row: by default the largest."""
        return [self.largest] * state.batch_size

    def go_on(self, state: State, count: list[int], signals: list[float]) -> list[bool]:
        """Whether to draft another guess, per row, from the number of guesses so far and the newest signal."""
        return [True] * len(count)

    def observe(self, drafted: list[int], kept: list[int]) -> None:
        """Receives the finished round: drafted[b] is the number of guesses of row b (`Draft.count`), kept[b] the number
        of tokens that it kept, recovered or bonus token included; 0 in idle rows."""


class FixedGamma(GammaPolicy):
    """Drafts `gamma` tokens in every round (Algorithm 1)."""

    class Settings(BaseSettings):
        gamma: int = Field(ge=0, le=LARGEST_GAMMA)

    def __init__(self, gamma: int, like: GammaPolicy | None = None):
        """Its rounds consist of the same calls as those of the policy `like`."""
        self.largest, self.widths = gamma, (gamma,)
        self.whole, self.signal = (True, None) if like is None else (like.whole, like.signal)
        self.constant = gamma if self.whole else None


class VaryingGamma(GammaPolicy):
    """Base class of policies whose gamma is any number up to `largest`."""

    class Settings(BaseSettings):
        largest: int = Field(ge=1, le=LARGEST_GAMMA)

    def __init__(self, largest: int):
        self.largest = largest
        self.widths = tuple(range(1, largest + 1))


class LeniencePolicy(Component):
    """Makes the run's verifier out of verifiers of constant lenience: here one, of the setting `lenience` in (0, 1]."""

    def __init__(self, lenience: float):
        self.lenience = lenience

    @classmethod
    def lowest(cls, settings: Any, lenience: float) -> float:
        """The lowest lenience that any round may have."""
        return lenience

    def verifier(self, with_lenience: Callable[[float], Verifier]) -> Verifier:
        """The run's verifier; with_lenience(l) makes a verifier of constant lenience l."""
        return with_lenience(self.lenience)
