"""What a metric is: numbers of each round from p, q and the verdict, and what a run makes of them."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specbench.component import Component
from specbench.decoding.draft import Draft


@dataclass(frozen=True)
class Path:
    """A round along the path that was taken through the draft. B rows, D steps, V vocabulary."""

    p: Tensor  # [B, D + 1, V], the target's law before each step and after the last
    draft: Draft  # a chain: the first guess that was tried at each step
    tokens: Tensor  # [B, D + 1], accepted guesses, then the target's own token
    accepted: Tensor  # [B]
    kept: Tensor  # [B], tokens that were emitted
    tested: Tensor  # [B], guesses that were judged

    def emitted(self) -> Tensor:
        """[B, D + 1]: which of the tokens were emitted."""
        return torch.arange(self.p.shape[1], device=self.p.device) < self.kept[:, None]

    def judged(self) -> Tensor:
        """[B, D]: which of the guesses were judged."""
        return torch.arange(self.p.shape[1] - 1, device=self.p.device) < self.tested[:, None]


class Metric(Component, ABC):
    """`columns` names the numbers of a round, as rounds.parquet shows them."""

    columns: tuple[str, ...]

    @classmethod
    def from_settings(cls, settings: Any) -> "Metric":
        """By default the settings are the constructor's arguments."""
        return cls(**vars(settings))

    @abstractmethod
    def of_round(self, path: Path) -> Tensor:
        """[B, K] float64, a number for each column. Runs outside the timed laps, on tensors only: an
        executor may compile it."""

    @abstractmethod
    def of_run(self, requests: Sequence[Sequence[tuple[float, ...]]]) -> Mapping[str, float | None]:
        """Named numbers of a run, from those of each round of each request."""
