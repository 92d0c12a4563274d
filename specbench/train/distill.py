"""Trains a small model towards the target's distribution, or several together, each on what those before it miss."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from specbench.models.load import PretrainedModel
from specbench.train.student import Student, StudentSettings, distances, quoted


class DistilledStudent(Student):
    """A small model; `model` is the checkpoint that it begins with, with the target's vocabulary (section 6)."""

    class Settings(StudentSettings):
        model: str = Field(description="a local folder or a hub id")

        @property
        def own_model(self) -> PretrainedModel.Settings:
            return PretrainedModel.Settings(path=self.model, weights="pretrained", chat_template="never")

    def __init__(self, target: Any, loss: str, settings: Any, model: Any = None):
        super().__init__(target, loss, settings)
        self.models: Any = nn.ModuleList([model])

    @classmethod
    def use(cls, settings: Any, folder: Path) -> list[str]:
        return ["drafter=model", quoted("drafter.path", folder)]

    def distributions(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The K guesses are those of the K models for the same position."""
        with torch.no_grad():
            p = self.target(input_ids=tokens).logits.flatten(0, 1)
        q = torch.stack([model(input_ids=tokens).logits.flatten(0, 1) for model in self.models], 1)
        return p[:, None].expand_as(q), q

    def models_in(self, folder: Path) -> list[Path]:
        return [folder]

    def save(self, folder: Path, accuracy: list[list[float]]) -> None:
        for model, path in zip(self.models, self.models_in(folder), strict=True):
            model.to(torch.bfloat16).save_pretrained(path)


class BoostedStudents(DistilledStudent):
    """`count` small models that all begin as the checkpoint `model`, in one training (SpecInfer's boost-tuning): a
    position counts for a drafter if no drafter before it has the target's argmax there. These are the examples that
    SpecInfer leaves in its data for this drafter, found anew at each step."""

    class Settings(DistilledStudent.Settings):
        count: int = Field(ge=1, le=16)

    def __init__(self, target: Any, loss: str, settings: Any, model: Any = None):
        super().__init__(target, loss, settings, model)
        self.models.extend(deepcopy(model) for _ in range(settings.count - 1))

    @classmethod
    def use(cls, settings: Any, folder: Path) -> list[str]:
        paths = ",".join(f'"{path}"' for path in drafter_folders(folder, settings.count))
        return ["drafter=multi_draft", "drafter.samples=1", f"drafter.paths=[{paths}]"]

    def weights(self, p: Tensor, q: Tensor) -> Tensor:
        """[n, K]: 1 where no drafter before this one has the argmax of p, else 0, from logits [n, K, V]."""
        missed = (q.argmax(-1) != p.argmax(-1)).to(p.dtype)
        return torch.cat([torch.ones_like(missed[:, :1]), missed[:, :-1].cumprod(1)], 1)

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        p, q = self.distributions(input_ids)
        return {"loss": (distances(self.loss, p, q) * self.weights(p, q)).sum(1).mean()}

    def models_in(self, folder: Path) -> list[Path]:
        return drafter_folders(folder, len(self.models))


def drafter_folders(folder: Path, count: int) -> list[Path]:
    """Where boosted drafters are written."""
    return [folder / f"drafter_{number}" for number in range(1, count + 1)]
