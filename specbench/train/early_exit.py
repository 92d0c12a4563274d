"""Trains the head of an early exit: the target's first layers learn to speak for all of them."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from specbench.models.early_exit import first_layers
from specbench.models.heads import Heads, HeadsConfig
from specbench.settings import setting
from specbench.train.student import Student, head_input


class EarlyExitStudent(Student):
    """One head between the target's own norm and output matrix, after some of its layers."""

    @dataclass
    class Settings:
        layers: int = setting(ge=1)
        inner: int | None = setting(ge=1)
        learning_rate: float = setting(gt=0)

    def __init__(self, settings: Settings, target: nn.Module, loss: str):
        super().__init__(target, loss)
        self.short = first_layers(target, settings.layers)
        hidden = target.get_output_embeddings().weight.shape[1]
        self.head = Heads(HeadsConfig(hidden, 1, settings.inner, layers=settings.layers))

    def laws(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        output = self.target.get_output_embeddings()
        with torch.no_grad():
            hidden = head_input(self.short, input_ids=tokens)
            p = self.target(input_ids=tokens).logits
        return p.flatten(0, 1)[:, None], output(self.head(hidden)).flatten(0, 1)

    def save(self, folder: Path, accuracy: list[list[float]]) -> None:
        self.head.config.accuracy = accuracy
        self.head.half().save_pretrained(folder)
