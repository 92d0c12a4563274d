"""Trains a small model towards the target's distribution, or several together, each on what those before it miss."""

from copy import deepcopy
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from specbench.train.student import Student, StudentSettings, distances, quoted

LEAST = 1e-9  # probability that a residual keeps, so that its logarithm is finite


class DistilledStudent(Student):
    """A small model; `model` is the checkpoint that it begins with, with the target's vocabulary (section 6)."""

    class Settings(StudentSettings):
        model: str = Field(description="a local folder or a hub id")

        @property
        def own_model(self) -> str | None:
            return self.model

    def __init__(self, target: Any, loss: str, settings: Any, model: Any = None):
        super().__init__(target, loss, settings)
        self.model = model

    @classmethod
    def use(cls, settings: Any, folder: Path) -> list[str]:
        return ["drafter=model", quoted("drafter.path", folder)]

    def distributions(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            p = self.target(input_ids=tokens).logits
        return p.flatten(0, 1)[:, None], self.model(input_ids=tokens).logits.flatten(0, 1)[:, None]

    def models_in(self, folder: Path) -> list[Path]:
        return [folder]

    def save(self, folder: Path, accuracy: list[list[float]]) -> None:
        self.model.to(torch.bfloat16).save_pretrained(folder)


class BoostedStudents(Student):
    """`count` small models that all begin as the checkpoint `model`, in one training (SpecInfer's boost-tuning).

    With `covers` "argmax" a position counts for a drafter if no drafter before it has the target's argmax there: the
    examples that SpecInfer leaves in its data for this drafter. With "residual" a drafter is trained towards the p that
    iterative speculative sampling has left after the ones before it were rejected, and a position counts as much as its
    chance to come to that: with loss=tv this is the probability that no guess is accepted. What counts is found anew
    from the drafters at each step.
    """

    class Settings(DistilledStudent.Settings):
        count: int = Field(ge=1, le=16)
        covers: Literal["argmax", "residual"]

    def __init__(self, target: Any, loss: str, settings: Any, model: Any = None):
        super().__init__(target, loss, settings)
        self.models: Any = nn.ModuleList([model, *(deepcopy(model) for _ in range(settings.count - 1))])

    @classmethod
    def use(cls, settings: Any, folder: Path) -> list[str]:
        paths = ",".join(f'"{path}"' for path in drafter_folders(folder, settings.count))
        return ["drafter=multi_draft", "drafter.samples=1", f"drafter.paths=[{paths}]"]

    def distributions(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The K guesses are those of the K drafters for the same position; p of each is what it is trained towards."""
        p, q, _ = self.weighted(tokens)
        return p, q

    def weighted(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of rows [B, T]: logits p [n, K, V] that each drafter is trained towards, its own logits q [n, K, V], and how
        much each position counts for it, [n, K]."""
        with torch.no_grad():
            p = self.target(input_ids=tokens).logits.flatten(0, 1)
        left, counts, best = p.softmax(-1), torch.ones_like(p[:, 0]), p.argmax(-1)
        aims: list[Tensor] = []
        guesses: list[Tensor] = []
        weights: list[Tensor] = []
        for model in self.models:
            q = model(input_ids=tokens).logits.flatten(0, 1)
            guesses.append(q)
            weights.append(counts)
            aims.append(p if self.settings.covers == "argmax" else left.clamp(min=LEAST).log())
            with torch.no_grad():
                if self.settings.covers == "argmax":
                    counts = counts * (q.argmax(-1) != best)
                else:
                    rest = (left - q.softmax(-1)).clamp(min=0)
                    miss = rest.sum(-1)
                    counts, left = counts * miss, rest / miss.clamp(min=LEAST)[:, None]
        return torch.stack(aims, 1), torch.stack(guesses, 1), torch.stack(weights, 1)

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        p, q, counts = self.weighted(input_ids)
        return {"loss": (distances(self.loss, p, q) * counts).sum(1).mean()}

    def models_in(self, folder: Path) -> list[Path]:
        return drafter_folders(folder, len(self.models))

    def save(self, folder: Path, accuracy: list[list[float]]) -> None:
        for model, path in zip(self.models, self.models_in(folder), strict=True):
            model.to(torch.bfloat16).save_pretrained(path)


def drafter_folders(folder: Path, count: int) -> list[Path]:
    """Where boosted drafters are written."""
    return [folder / f"drafter_{number}" for number in range(1, count + 1)]
