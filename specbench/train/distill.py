"""Distils a drafter: a small model learns the target's law, by KL or by the total variation itself."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from specbench.settings import setting
from specbench.train.student import Student


class DistilledStudent(Student):
    """`model` is where it begins: a checkpoint with the target's vocabulary."""

    whole = True

    @dataclass
    class Settings:
        model: str = setting(required="a local folder or a hub id")
        learning_rate: float = setting(gt=0)

    def __init__(self, settings: Settings, target: nn.Module, loss: str, model: nn.Module):
        super().__init__(target, loss)
        self.model = model

    def laws(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            p = self.target(input_ids=tokens).logits
        return p.flatten(0, 1)[:, None], self.model(input_ids=tokens).logits.flatten(0, 1)[:, None]

    def save(self, folder: Path, accuracy: list[list[float]]) -> None:
        self.model.to(torch.bfloat16).save_pretrained(folder)
