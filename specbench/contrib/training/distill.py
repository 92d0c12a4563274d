"""Distils a drafter: trains a small model on the target's distribution, by KL or by total variation (section 6)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specbench.contrib.training.student import Student, StudentSettings, quoted
from specbench.settings import setting


class DistilledStudent(Student):
    """A small model; `model` is the checkpoint that it begins with, with the target's vocabulary."""

    @dataclass
    class Settings(StudentSettings):
        model: str = setting(required="a local folder or a hub id")

        @property
        def own_model(self) -> str | None:
            return self.model

    def __init__(self, target: Any, loss: str, model: Any):
        super().__init__(target, loss)
        self.model = model

    @classmethod
    def from_settings(cls, settings: Any, target: Any, loss: str, model: Any) -> "DistilledStudent":
        assert model is not None
        return cls(target, loss, model)

    @classmethod
    def use(cls, settings: Any, folder: Path) -> list[str]:
        return ["drafter=model", quoted("drafter.path", folder)]

    def laws(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            p = self.target(input_ids=tokens).logits
        return p.flatten(0, 1)[:, None], self.model(input_ids=tokens).logits.flatten(0, 1)[:, None]

    def complete(self, folder: Path) -> list[Path]:
        return [folder]

    def save(self, folder: Path, accuracy: list[list[float]]) -> None:
        self.model.to(torch.bfloat16).save_pretrained(folder)
