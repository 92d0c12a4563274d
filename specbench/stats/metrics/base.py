"""Base class of metrics: numbers of each round, computed from p, q and the verdict, and their summary over a run."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specbench.decoding.component import Component
from specbench.decoding.draft import Draft


@dataclass(frozen=True)
class Path:
    """A round along the path that was taken through the draft. B rows, D steps, V vocabulary."""

    p: Tensor  # [B, D + 1, V], the target's distribution at each step and after the last
    draft: Draft  # a chain: the first guess that was tried at each step
    tokens: Tensor  # [B, D + 1], accepted guesses, then the recovered or bonus token
    accepted: Tensor  # [B], n
    kept: Tensor  # [B], tokens that were emitted
    tested: Tensor  # [B], guesses that were tested, none beyond a stop

    def emitted(self) -> Tensor:
        """[B, D + 1] bool: which of the tokens were emitted."""
        return torch.arange(self.p.shape[1], device=self.p.device) < self.kept[:, None]

    def judged(self) -> Tensor:
        """[B, D] bool: which of the guesses were tested."""
        return torch.arange(self.p.shape[1] - 1, device=self.p.device) < self.tested[:, None]


class Metric(Component, ABC):
    """Computes numbers of each round, and from these numbers of a run. `columns` names the numbers of a round in
    rounds.parquet."""

    columns: tuple[str, ...]

    @classmethod
    def from_settings(cls, settings: Any) -> "Metric":
        """Builds the metric; by default the settings are the constructor's arguments."""
        return cls(**vars(settings))

    @abstractmethod
    def of_round(self, path: Path) -> Tensor:
        """[B, K] float64: the K numbers of `columns` for each row. Runs outside the timed laps, on tensors only, since
        an executor may compile it."""

    @abstractmethod
    def of_run(self, requests: Sequence[Sequence[tuple[float, ...]]]) -> Mapping[str, float | None]:
        """Named numbers of a run, from the numbers of each round of each request."""
