"""Base class of what can be trained: drafters, heads, exits and look-ahead embeddings.

B rows, T tokens, n positions, K guesses, V vocabulary, H hidden.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from specbench.contrib.training.losses import distances, overlap
from specbench.decoding.component import Component
from specbench.models.language_model import head_inputs
from specbench.settings import BaseSettings, setting

BEST = 10  # tokens of each head whose accuracy is measured


@dataclass
class StudentSettings(BaseSettings):
    """Settings of every method of training."""

    learning_rate: float = setting(ge=1e-9, le=10)

    @property
    def ahead(self) -> int:
        """The number of guesses after the next token."""
        return 0

    @property
    def own_model(self) -> str | None:
        """The checkpoint of the student's own model; None if it has none."""
        return None


class Student(Component, nn.Module, ABC):
    """The trained module beside the frozen target. Subclasses compute logits of p and q; loss and evaluation are the
    same for all that have no others."""

    target: Any
    spans: ClassVar[bool] = False  # whether it is told which places of a row count, as in rows of prompts and answers

    def __init__(self, target: Any, loss: str, settings: Any, model: Any = None):
        """`model` is the loaded checkpoint `settings.own_model`, or None."""
        super().__init__()
        object.__setattr__(self, "target", target.requires_grad_(False).eval())  # no part: not trained, not stored
        self.loss, self.settings = loss, settings

    @classmethod
    def unfit(cls, settings: Any, target: Any) -> str | None:
        """Why nothing can be trained with these settings for a target of this configuration, or None."""
        return None

    def prepare(self, tokens: Tensor, spans: Tensor) -> None:
        """What follows from the rows [n, T] of the training, of which the places spans [n, 2] count."""

    @classmethod
    @abstractmethod
    def use(cls, settings: Any, folder: Path) -> list[str]:
        """The overrides of a run that uses what was trained and saved in the folder."""

    def laws(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of p and of q, both `[n, K, V]`, at the positions of the rows of text `[B, T]`."""
        raise NotImplementedError  # by a student with a `forward` and an `evaluate` of its own

    @abstractmethod
    def save(self, folder: Path, accuracy: list[list[float]]) -> None:
        """Writes what was trained, as a Hugging Face checkpoint. `accuracy[k][i]` is how often the i-th best token of
        guess k was the target's argmax."""

    def complete(self, folder: Path) -> list[Path]:
        """The folders of the complete models that `save` writes, which get the tokenizer too."""
        return []

    def optimisers(self, learning_rate: float, steps: int, warmup: int = 20) -> tuple[Any, Any]:
        """The optimiser and its schedule over so many steps, the first ones of warm-up; (None, None) for those of all
        other students: AdamW, with a cosine after a warm-up."""
        return None, None

    def further(self, rows: Sequence[Tensor]) -> dict[str, float]:
        """More numbers of held-out rows, each a batch `[B, T]`, for metrics.json."""
        return {}

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """What is trained, each tensor once."""
        trained = {name for name, weight in self.named_parameters() if weight.requires_grad}
        return {name: tensor for name, tensor in super().state_dict(*args, **kwargs).items() if name in trained}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As that of the base class, of what `state_dict` gave."""
        return super().load_state_dict({**super().state_dict(), **state_dict}, strict, assign)

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        """The loss, a scalar, of rows `[B, T]`, in the form that transformers.Trainer expects."""
        return {"loss": distances(self.loss, *self.laws(input_ids)).mean()}

    @torch.no_grad()
    def evaluate(self, tokens: Tensor, spans: Tensor | None = None) -> Tensor:
        """Sums over the positions of rows `[B, T]`, for each of K guesses: beta (Theorem 3.5), then whether the best,
        second best, ... token was the target's argmax, then 1. Returns `[K, 2 + BEST]`. spans `[B, 2]` are the first
        and the last place that counts, None for all."""
        p, q = self.laws(tokens)
        hits = (q.topk(BEST, dim=-1).indices == p.argmax(-1, keepdim=True)).sum(0)
        return torch.cat([overlap(p, q).sum(0)[:, None], hits, torch.full_like(hits[:, :1], len(p))], 1).double().cpu()


def head_input(module: Any, **inputs: Tensor) -> Tensor:
    """The last hidden states `[B, T, H]` of a causal model: the inputs of its output matrix."""
    with head_inputs(module) as found:
        module(**inputs)
    return found[0]


def quoted(key: str, folder: Path) -> str:
    """The override `key="folder"`: quoted, the folder may hold any character of Hydra's grammar."""
    return f'{key}="{folder}"'
