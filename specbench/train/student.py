"""Base class of what can be trained, and the losses: how far a drafter's distribution q is from the target's p. And a
small model, or several together, each on what those before it miss.

B rows, T tokens, n positions, K guesses, V vocabulary, H hidden.
"""

from abc import ABC, abstractmethod
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from specbench.models.layers import hidden_states
from specbench.models.load import PretrainedModel
from specbench.settings import BaseSettings, Component

BEST = 10  # tokens of each guess whose accuracy is measured


class StudentSettings(BaseSettings):
    """Settings of every method of training."""

    learning_rate: float = Field(ge=1e-9, le=10)

    @property
    def ahead(self) -> int:
        """The number of guesses after the next token."""
        return 0

    @property
    def own_model(self) -> Any:
        """Settings of the checkpoint of the student's own model; None if it has none."""
        return None


class Student(Component, nn.Module, ABC):
    """The trained module beside the frozen target. Subclasses compute logits of p and q."""

    target: Any
    part: Any  # what is trained, unless `save` is another

    def __init__(self, target: Any, loss: str, settings: Any, model: Any = None):
        """`model` is the loaded checkpoint `settings.own_model`, or None."""
        super().__init__()
        # Not registered as a submodule: the target is neither trained nor stored.
        object.__setattr__(self, "target", target.requires_grad_(False).eval())
        self.loss, self.settings = loss, settings

    @classmethod
    @abstractmethod
    def use(cls, settings: Any, folder: Path) -> list[str]:
        """The overrides of a run that uses what was trained and saved in the folder."""

    @abstractmethod
    def distributions(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of p and of q, both [n, K, V], at the positions of rows of text [B, T]."""

    def save(self, folder: Path, accuracy: list[list[float]]) -> None:
        """Writes a Hugging Face checkpoint. `accuracy[k][i]`: how often guess k's i-th best token was the argmax."""
        self.part.config.accuracy = accuracy
        self.part.half().save_pretrained(folder)

    def models_in(self, folder: Path) -> list[Path]:
        """The folders of the complete models that `save` writes, which get the tokenizer too."""
        return []

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        """The loss, a scalar, of rows [B, T], in the form that transformers.Trainer expects."""
        return {"loss": distances(self.loss, *self.distributions(input_ids)).mean()}

    @torch.no_grad()
    def evaluate(self, tokens: Tensor) -> Tensor:
        """Sums over the positions of rows [B, T], for each of K guesses: beta (Theorem 3.5), then whether the best,
        second best, ... token was the target's argmax, then 1. Returns [K, 2 + BEST] float64 on the CPU."""
        p, q = self.distributions(tokens)
        hits = (q.topk(BEST, dim=-1).indices == p.argmax(-1, keepdim=True)).sum(0)
        ones = torch.full_like(hits[:, :1], len(p))
        return torch.cat([overlap(p, q).sum(0)[:, None], hits, ones], 1).double().cpu()


def distances(kind: str, p: Tensor, q: Tensor) -> Tensor:
    """The loss [...] of each position, from logits p [..., V] and q [..., V]: "tv" is the total variation, which is
    D_LK of Definition 3.2 and 1 - beta (Theorem 3.5); "kl" is KL(p | q) in nats."""
    log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
    if kind == "tv":
        return 0.5 * (log_p.exp() - log_q.exp()).abs().sum(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def overlap(p: Tensor, q: Tensor) -> Tensor:
    """beta [...] = sum_x min(p, q) of every position (Theorem 3.5), from logits p [..., V] and q [..., V]."""
    return torch.minimum(p.softmax(-1), q.softmax(-1)).sum(-1)


def head_input(module: Any, tokens: Tensor) -> Tensor:
    """The last hidden states [B, T, H] of a causal model on tokens [B, T]: the inputs of its output matrix."""
    with hidden_states(module, ()) as found:
        module(input_ids=tokens)
    return found[0]


def quoted(key: str, folder: Path) -> str:
    """The override `key="folder"`: quoted, the folder may hold any character of Hydra's grammar."""
    return f'{key}="{folder}"'


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
