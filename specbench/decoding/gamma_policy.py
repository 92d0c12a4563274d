"""What a gamma policy is: how many tokens to draft in the next round."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from specbench.component import Choices, Component
from specbench.decoding.draft import Draft

Signal = Callable[[Tensor, Tensor], Tensor]
Floats = npt.NDArray[np.float64]


class RowsSeen(Protocol):
    """What a policy sees of a state; replay stands in with one row."""

    lengths: list[int]
    prompt_lengths: list[int]
    serials: dict[int, int]

    @property
    def batch_size(self) -> int: ...


class Costs(Protocol):
    """What rounds cost and how often guesses were accepted, as far as it has been measured."""

    @property
    def alpha(self) -> float:
        """Mean beta."""

    acceptance: tuple[float, int]  # sum of betas, tested positions

    def seconds(self, largest: int) -> Floats:
        """Time of a round with 0 .. largest drafted tokens, [largest + 1]."""


class DraftStop(Protocol):
    """Ends a row's draft while it is being drawn."""

    @property
    def signal(self) -> Signal | None: ...

    def go_on(self, state: RowsSeen, count: list[int], signals: list[float]) -> list[bool]: ...


class GammaPolicy(Component, ABC):
    """`largest` is the most tokens that it drafts, `widths` the lengths of draft that it uses, which
    executors with fixed shapes pad to, and `constant` is gamma where it never changes."""

    replay_only: ClassVar[bool] = False  # whether it knows the future
    calibrated: ClassVar[bool] = False  # whether it chooses by measured costs
    watches: ClassVar[bool] = False  # whether it may end a draft by the signal of a guess

    largest: int
    widths: tuple[int, ...]
    constant: int | None = None
    # A number of q [B, V] (before argmax at temperature 0) and the guess [B]: [B].
    signal: Signal | None = None
    traced_as: str = ""  # the column of a stored text that replay takes for the signal

    @classmethod
    def from_settings(cls, settings: Any) -> "GammaPolicy":
        """By default the settings are the constructor's arguments."""
        return cls(**vars(settings))

    @classmethod
    def refuses(cls, settings: Any, run: Choices) -> str | None:
        if cls.replay_only:
            return "in a run, since it knows the future: use python -m specbench.replay outputs/RUN"
        drafter = run["drafter"]
        if cls.watches and not drafter.kind.ends_early:
            return (
                f"with drafter={drafter.name}: it needs a drafter that is a model, use drafter=stdlib or drafter=model"
            )
        return None

    @property
    def stop(self) -> DraftStop | None:
        """The policy itself, where it looks at each guess of a draft."""
        return None if self.signal is None else self

    def calibrate(self, costs: Costs) -> None:
        """Takes the time of a round by gamma, and a first mean beta."""

    @abstractmethod
    def next_gamma(self, state: RowsSeen) -> list[int]:
        """Tokens to draft, per row."""

    def go_on(self, state: RowsSeen, count: list[int], signals: list[float]) -> list[bool]:
        """Whether to draft another guess, per row, given how many there are and the signal of the last one."""
        return [True] * len(count)

    def observe(self, draft: Draft, kept: list[int]) -> None:
        """What became of the round: `kept` tokens per row, its own one included, 0 in idle rows."""

    def foresee(self, outcomes: Sequence[bool], betas: Floats) -> None:
        """In replay, for each position of the next text: whether a guess would be accepted there, and beta."""
