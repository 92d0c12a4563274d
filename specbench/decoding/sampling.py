"""Standardized sampling (section 2.2): from logits to the distribution that is sampled from.

Temperature, top-k, top-p and the repetition penalty are applied to target and drafter alike, in the order transformers
applies them, so that what is left is plain sampling from a distribution.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specbench.decoding.noise import exponentials

kernels: Any = None  # fused `softmax`, `draw` and `speculative_sampling`: see `use`


def use(operators: Any) -> None:
    """From now on these operators (`kernels/ops.py`) take the place of the plain code where they run."""
    global kernels
    kernels = operators


@dataclass(frozen=True)
class Sampling:
    """How logits become probabilities. top_k = 0, top_p = 1 and repetition_penalty = 1 are off. `before_argmax` leaves
    out the argmax of temperature 0, because lenience compares probabilities before it (A.5)."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    before_argmax: bool = False

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def probabilities(self, logits: Tensor, seen: Tensor | None = None) -> Tensor:
        """Logits [..., V] to float32 probabilities [..., V] (section 2.2); one-hot at temperature 0. `seen` [..., V]
        marks the tokens of the context for the repetition penalty."""
        logits = self.penalize(logits.float(), seen)
        if self.greedy and self.before_argmax:
            return _softmax(logits)
        if self.greedy:
            choice = logits.argmax(-1, keepdim=True)
            return torch.zeros_like(logits).scatter_(-1, choice, 1.0)
        if self.temperature != 1:
            logits = logits / self.temperature
        return _softmax(self.truncate(logits))

    def penalize(self, logits: Tensor, seen: Tensor | None) -> Tensor:
        """Logits [..., V] after the repetition penalty on the tokens that `seen` [..., V] marks; None marks none."""
        if self.repetition_penalty == 1 or seen is None:
            return logits
        penalty = self.repetition_penalty
        return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)

    def truncate(self, logits: Tensor) -> Tensor:
        """Logits [..., V] to logits [..., V] that are -inf for all tokens outside top-k and top-p."""
        if 0 < self.top_k < logits.shape[-1]:
            kth = logits.topk(self.top_k, dim=-1).values[..., -1:]
            logits = logits.masked_fill(logits < kth, -torch.inf)
        if self.top_p < 1:
            ordered, index = logits.sort(-1)  # ascending: the tail comes first
            tail = ordered.softmax(-1).cumsum(-1) <= 1 - self.top_p
            tail[..., -1].fill_(False)  # the most probable token always stays
            logits = logits.masked_fill(torch.zeros_like(tail).scatter_(-1, index, tail), -torch.inf)
        return logits


def fused(device: torch.device) -> bool:
    """Whether `kernels` take the place of the plain code on a device."""
    return kernels is not None and bool(kernels.run_on(device))


def _softmax(logits: Tensor) -> Tensor:
    """Probabilities [..., V] of float32 logits [..., V]."""
    probabilities: Tensor = kernels.softmax(logits) if fused(logits.device) else logits.softmax(-1)
    return probabilities


def draw(weights: Tensor, bits: Tensor) -> Tensor:
    """Samples one token from each of the unnormalised weights [..., V], with random bits [...]: tokens [...]. An
    exponential race: token x finishes at E_x / w_x, and the first one wins with probability proportional to w_x. Unlike
    the inverse of a cumulative sum, whose thousands of boundaries all move when a sum is rounded differently, it gives
    the same token in a batch of any size."""
    if fused(weights.device):
        tokens: Tensor = kernels.race(weights, bits)
        return tokens
    return (weights / exponentials(bits, weights.shape[-1])).argmax(-1)
