"""Extra heads on a model's last hidden state (Medusa, blockwise parallel decoding, early exits).

Nothing of the model is copied: a head changes the hidden state, and the model's own output matrix turns it into logits.
K heads, H hidden, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel


class HeadsConfig(PretrainedConfig):
    """`inner` is the width of a bottleneck; None is one square matrix, as in Medusa. `accuracy[k][i]` is how often the
    i-th best token of head k was the target's argmax."""

    model_type = "specbench_heads"

    def __init__(
        self,
        hidden_size: int = 0,
        heads: int = 1,
        inner: int | None = None,
        layers: int | None = None,
        accuracy: list[list[float]] | None = None,
        **more: Any,
    ):
        super().__init__(**more)
        self.hidden_size, self.heads, self.inner = hidden_size, heads, inner
        self.layers = layers  # how many of the target's first layers they follow; None is all
        self.accuracy = accuracy or []

    def check(self) -> None:
        """Raises ValueError if a value is not possible."""
        for name in ("hidden_size", "heads", "inner", "layers"):
            value = getattr(self, name)
            optional = name in ("inner", "layers") and value is None
            if not optional and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name}={value} in its config.json, which must be an integer >= 1")
        rows = self.accuracy
        if not isinstance(rows, list) or len(rows) not in (0, self.heads) or not all(map(_shares, rows)):
            raise ValueError("accuracy in its config.json must be a list of numbers from 0 to 1 for each head")


def _shares(row: Any) -> bool:
    return isinstance(row, list) and row != [] and all(isinstance(x, (int, float)) and 0 <= x <= 1 for x in row)


class Heads(PreTrainedModel):
    """h + silu(U_k h) for each head k (Medusa), or with a bottleneck h + D_k silu(U_k h)."""

    config_class = HeadsConfig

    def __init__(self, config: HeadsConfig):
        super().__init__(config)
        heads, hidden, inner = config.heads, config.hidden_size, config.inner
        self.up = nn.Parameter(torch.zeros(heads, inner or hidden, hidden))
        self.down = None if inner is None else nn.Parameter(torch.zeros(heads, hidden, inner))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Makes every head begin as the model's own: the residual is zero."""
        if self.down is not None:
            nn.init.normal_(self.up, std=self.config.hidden_size**-0.5)

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., H] to [..., K, H], one for each head."""
        change = nn.functional.silu(torch.einsum("...h,kih->...ki", hidden, self.up))
        if self.down is not None:
            change = torch.einsum("...ki,khi->...kh", change, self.down)
        return hidden.unsqueeze(-2) + change


class ExitHead(nn.Module):
    """One head in front of an output matrix: the logits of a model that stops early."""

    def __init__(self, head: Heads, output: nn.Module):
        super().__init__()
        self.head, self.output = head, output

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., H] to logits [..., V]."""
        logits: Tensor = self.output(self.head(hidden).squeeze(-2))
        return logits
