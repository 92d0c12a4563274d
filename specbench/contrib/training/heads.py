"""Trains heads on the target's last hidden state, for Medusa and for blockwise parallel decoding."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specbench.contrib.training.student import Student, StudentSettings, head_input, quoted
from specbench.models.trained_parts import Heads, HeadsConfig
from specbench.settings import setting


class HeadsStudent(Student):
    """Head k predicts, from the hidden state of a position, the token k positions after the target's own next token.
    `drafter` is the drafter that the heads are for."""

    @dataclass
    class Settings(StudentSettings):
        heads: int = setting(ge=1, le=1000)
        inner: int | None = setting(ge=1, le=10**5)
        drafter: str = setting(choices=("medusa", "blockwise"))

        @property
        def ahead(self) -> int:
            return self.heads

    def __init__(self, target: Any, loss: str, heads: int, inner: int | None):
        super().__init__(target, loss)
        hidden = target.get_output_embeddings().weight.shape[1]
        self.heads = Heads(HeadsConfig(hidden, heads, inner))

    @classmethod
    def from_settings(cls, settings: Any, target: Any, loss: str, model: Any) -> "HeadsStudent":
        return cls(target, loss, settings.heads, settings.inner)

    @classmethod
    def use(cls, settings: Any, folder: Path) -> list[str]:
        return [f"drafter={settings.drafter}", quoted("drafter.heads", folder)]

    def laws(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        count, output = self.heads.config.heads, self.target.get_output_embeddings()
        with torch.no_grad():
            hidden = head_input(self.target, input_ids=tokens)  # [B, T, H]
            ahead = hidden.unfold(1, count + 1, 1)[..., 1:]  # [B, T - K, H, K], the K positions after each
            p = output(ahead.transpose(2, 3))
        q = output(self.heads(hidden[:, :-count]))
        return p.flatten(0, 1), q.flatten(0, 1)

    def save(self, folder: Path, accuracy: list[list[float]]) -> None:
        self.heads.config.accuracy = accuracy
        self.heads.half().save_pretrained(folder)
