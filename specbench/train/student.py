"""Base class of what can be trained: drafters, heads, exits and look-ahead embeddings."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from specbench.component import Component
from specbench.models.head_input import head_inputs
from specbench.settings import BaseSettings, setting
from specbench.train.losses import divergence, overlap, ranks

BEST = 10  # tokens of each head whose accuracy is measured


@dataclass
class StudentSettings(BaseSettings):
    """What every method of training has."""

    learning_rate: float = setting(gt=0)

    @property
    def ahead(self) -> int:
        """Guesses ahead of the next token."""
        return 0

    @property
    def own_model(self) -> str | None:
        """The checkpoint of a model of the student's own, if it has one."""
        return None


class Student(Component, nn.Module, ABC):
    """What is trained, beside the frozen target. Subclasses return the laws p and q; loss and evaluation are
    the same for all of them."""

    whole: ClassVar[bool] = False  # whether what is saved is a model of its own

    def __init__(self, target: Any, loss: str):
        super().__init__()
        self.target, self.loss = target.requires_grad_(False), loss

    @classmethod
    @abstractmethod
    def from_settings(cls, settings: Any, target: Any, loss: str, model: Any) -> "Student":
        """For a target; `model` is the checkpoint `settings.own_model`, loaded."""

    @classmethod
    @abstractmethod
    def use(cls, settings: Any, folder: Path) -> list[str]:
        """The overrides of a run that uses what was trained and saved in the folder."""

    @abstractmethod
    def laws(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of text [B, T] to logits p and q [n, K, V] of K guesses at n positions of it."""

    @abstractmethod
    def save(self, folder: Path, accuracy: list[list[float]]) -> None:
        """Writes what was trained, as a Hugging Face checkpoint."""

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        """What transformers.Trainer wants."""
        return {"loss": divergence(self.loss, *self.laws(input_ids))}

    @torch.no_grad()
    def evaluate(self, tokens: Tensor) -> Tensor:
        """Per guess: sum of betas, then hits of the best, second best, ... token; [K, 1 + BEST], and
        the last column is the number of positions."""
        p, q = self.laws(tokens)
        hits = ranks(p, q, BEST).sum(0)
        return torch.cat([overlap(p, q).sum(0)[:, None], hits, torch.full_like(hits[:, :1], len(p))], 1).double().cpu()


def head_input(module: Any, **inputs: Tensor) -> Tensor:
    """The hidden states [B, T, H] that the output matrix of a causal model is applied to."""
    with head_inputs(module) as found:
        module(**inputs)
    return found[0]


def quoted(key: str, folder: Path) -> str:
    """An override whose value may hold any character that Hydra's grammar has a meaning for."""
    return f'{key}="{folder}"'
