"""Trains heads and the model that they sit on together (Medusa-2): the target becomes another model."""

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from specbench.contrib.training.heads import HeadsStudent
from specbench.contrib.training.losses import distances, overlap
from specbench.contrib.training.student import quoted
from specbench.models.language_model import head_inputs
from specbench.settings import setting

ANCHORS = ("text", "target")
DECAY = 0.8  # of the weight from one head to the next (Medusa, section 2.2)


class JointHeadsStudent(HeadsStudent):
    """A copy of the target, the backbone, and Medusa heads on it. The loss is that of the backbone and `share` times
    that of the heads, of which head k counts DECAY^k (Medusa-2's combined loss).

    The backbone's loss keeps it a language model: with `anchor` "text", -log of the text's next token; with "target",
    KL from the target that it began as (the paper's self-distillation). The heads are trained towards the backbone's
    own distributions, as they are at that step. The backbone has `backbone_rate` times the learning rate of the heads,
    and does not move for the first `heads_first` of all steps (the two stages).

    Drafts of the heads leave the output distribution of the new model as it is, which is not that of the target.
    """

    @dataclass
    class Settings(HeadsStudent.Settings):
        share: float = setting(ge=1e-6, le=1000)
        anchor: str = setting(choices=ANCHORS)
        backbone_rate: float = setting(ge=1e-6, le=1)
        heads_first: float = setting(ge=0, le=0.99)

    def __init__(self, target: Any, loss: str, settings: Any, model: Any = None):
        super().__init__(target, loss, settings)
        self.backbone = deepcopy(target).requires_grad_(True)

    @classmethod
    def use(cls, settings: Any, folder: Path) -> list[str]:
        model = ["target=model", quoted("target.path", folder / "model")]
        return [*model, *super().use(settings, folder / "heads")]

    def hidden(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The backbone's logits [B, T, V] and last hidden states [B, T, H]."""
        with head_inputs(self.backbone) as found:
            logits: Tensor = self.backbone(input_ids=tokens).logits
        return logits, found[0]

    def laws(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self._laws(*self.hidden(tokens))

    def _laws(self, logits: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        count = self.heads.config.heads
        p = logits.detach().unfold(1, count + 1, 1)[..., 1:].transpose(2, 3)  # [B, T - K, K, V]
        q = self.backbone.get_output_embeddings()(self.heads(hidden[:, :-count]))
        return p.flatten(0, 1), q.flatten(0, 1)

    def losses(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The backbone's loss and the heads', of rows [B, T]."""
        logits, hidden = self.hidden(tokens)
        if self.settings.anchor == "text":
            backbone = next_token_loss(logits, tokens)
        else:
            with torch.no_grad():
                before = self.target(input_ids=tokens).logits
            backbone = distances("kl", before, logits).mean()
        p, q = self._laws(logits, hidden)
        weights = DECAY ** torch.arange(1, q.shape[1] + 1, device=q.device)
        return backbone, (distances(self.loss, p, q).mean(0) * weights).sum()

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        backbone, heads = self.losses(input_ids)
        return {"loss": backbone + self.settings.share * heads}

    def optimisers(self, learning_rate: float, steps: int, warmup: int = 20) -> tuple[Any, Any]:
        first = int(self.settings.heads_first * steps)

        def cosine(step: int) -> float:
            return min(1.0, (step + 1) / max(1, warmup)) * 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))

        def later(step: int) -> float:
            return min(1.0, (step - first) / max(1, warmup)) * cosine(step) if step >= first else 0.0

        own = [
            {"params": self.heads.parameters(), "lr": learning_rate},
            {"params": self.backbone.parameters(), "lr": learning_rate * self.settings.backbone_rate},
        ]
        optimiser = AdamW(own, weight_decay=0.0)
        return optimiser, LambdaLR(optimiser, [cosine, later])

    @torch.no_grad()
    def further(self, rows: Sequence[Tensor]) -> dict[str, float]:
        """How far the backbone is from the target that it began as: sum_x min, agreement of argmaxes, and -log of the
        text's next token, before and after."""
        found = []
        for tokens in rows:
            before, after = self.target(input_ids=tokens).logits, self.backbone(input_ids=tokens).logits
            nats = [next_token_loss(logits, tokens) for logits in (before, after)]
            same = (before.argmax(-1) == after.argmax(-1)).float().mean()
            found.append(torch.stack([overlap(before, after).mean(), same, *nats]) * len(tokens))
        means = torch.stack(found).sum(0) / sum(len(tokens) for tokens in rows)
        names = ("overlap_with_target", "agreement_with_target", "target_nats", "nats")
        return dict(zip(names, means.tolist(), strict=True))

    def complete(self, folder: Path) -> list[Path]:
        return [folder / "model"]

    def save(self, folder: Path, accuracy: list[list[float]]) -> None:
        self.backbone.to(torch.bfloat16).save_pretrained(folder / "model")
        super().save(folder / "heads", accuracy)


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """The mean of -log of the text's next token, in nats, from logits [B, T, V] of rows [B, T]."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
