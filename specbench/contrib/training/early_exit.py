"""Trains the head of an early exit, so that the target's first layers predict what all of them predict."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specbench.contrib.training.student import Student, StudentSettings, head_input, quoted
from specbench.models.shared_cache import first_layers
from specbench.models.trained_parts import Heads, HeadsConfig
from specbench.settings import setting


class EarlyExitStudent(Student):
    """One head between the target's own norm and output matrix, after its first `layers` layers."""

    @dataclass
    class Settings(StudentSettings):
        layers: int = setting(ge=1, le=10_000)
        inner: int | None = setting(ge=1, le=10**5)

    def __init__(self, target: Any, loss: str, layers: int, inner: int | None):
        super().__init__(target, loss)
        self.short = first_layers(target, layers)
        hidden = target.get_output_embeddings().weight.shape[1]
        self.head = Heads(HeadsConfig(hidden, 1, inner, layers=layers))

    @classmethod
    def from_settings(cls, settings: Any, target: Any, loss: str, model: Any) -> "EarlyExitStudent":
        return cls(target, loss, settings.layers, settings.inner)

    @classmethod
    def use(cls, settings: Any, folder: Path) -> list[str]:
        return ["drafter=early_exit", quoted("drafter.head", folder)]

    def laws(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        output = self.target.get_output_embeddings()
        with torch.no_grad():
            hidden = head_input(self.short, input_ids=tokens)
            p = self.target(input_ids=tokens).logits
        return p.flatten(0, 1)[:, None], output(self.head(hidden)).flatten(0, 1)

    def save(self, folder: Path, accuracy: list[list[float]]) -> None:
        self.head.config.accuracy = accuracy
        self.head.half().save_pretrained(folder)
