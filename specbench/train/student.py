"""What is trained: something that says q for one or more guesses, beside the frozen target that says p."""

from abc import ABC, abstractmethod
from pathlib import Path

import torch
from torch import Tensor, nn

from specbench.train.losses import divergence, overlap, ranks

BEST = 10  # tokens of each head whose accuracy is measured


class Student(nn.Module, ABC):
    """A subclass says how its laws are found; loss and evaluation are alike for all of them."""

    whole = False  # whether what is saved is a model of its own

    def __init__(self, target: nn.Module, loss: str):
        super().__init__()
        self.target, self.loss = target.requires_grad_(False), loss

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


def head_input(module: nn.Module, **inputs: Tensor) -> Tensor:
    """The hidden states [B, T, H] that the output matrix of a causal model is applied to."""
    found: list[Tensor] = []
    hook = module.get_output_embeddings().register_forward_pre_hook(lambda _, given: found.append(given[0]))
    try:
        module(**inputs)
    finally:
        hook.remove()
    return found[0]
