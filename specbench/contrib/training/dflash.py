"""Trains a DFlash drafter (2602.06036): a block of masks, filled in one pass beside the target's hidden states."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from specbench.contrib.dflash.config import parse_dflash
from specbench.contrib.dflash.network import DFlashNetwork
from specbench.contrib.training.features import FeatureStudent, last_norm, layer_sizes
from specbench.contrib.training.student import quoted
from specbench.settings import setting


class DFlashStudent(FeatureStudent):
    """Layers that fill a block of masks in one pass.

    `anchors` blocks of a row, which do not see each other, are filled at once. They begin at random places, when it is
    measured at even distances. Embedding and output matrix are the target's own, and stay.
    """

    head: Tensor  # [V', H]

    @dataclass
    class Settings(FeatureStudent.Settings):
        block_size: int = setting(ge=2, le=1000)
        anchors: int = setting(ge=1, le=10**5)
        mask_token: int | None = setting(ge=0)

        @property
        def ahead(self) -> int:
            return self.block_size

    @classmethod
    def unfit(cls, settings: Any, target: Any) -> str | None:
        if (settings.mask_token or 0) >= target.vocab_size:
            return f"method.mask_token={settings.mask_token} is not possible: the target has {target.vocab_size} tokens"
        return super().unfit(settings, target)

    @classmethod
    def use(cls, settings: Any, folder: Path) -> list[str]:
        return ["drafter=dflash", quoted("drafter.path", folder), f"gamma={settings.block_size - 1}"]

    def build(self, target: Any) -> None:
        own, total = self.settings, target.num_hidden_layers
        rarest = len(self.frequency) - 1 - int(self.frequency.flip(0).argmin())  # the last one, if there are several
        low, high = (2, total - 2) if total >= 8 else (1, total)
        spread = [round(high - i * (high - low) / max(1, own.layers - 1)) for i in reversed(range(own.layers))]
        self.config_json = self.speculators(
            "dflash", "DFlashDraftModel", own.block_size - 1, layer_sizes(target, "qwen3", own),
            block_size=own.block_size, mask_token_id=rarest if own.mask_token is None else own.mask_token,
            aux_hidden_state_layer_ids=own.feature_layers or spread, sample_from_anchor=False,
        )  # fmt: skip
        shape = parse_dflash(self.config_json, "the drafter")
        self.network = DFlashNetwork(shape, len(self.read_layers) * target.hidden_size).to_empty(device="cpu")
        self.network.rotary = Qwen3RotaryEmbedding(shape.layers)
        for part in self.network.modules():
            if isinstance(part, nn.Linear):
                nn.init.normal_(part.weight, std=0.02)
            elif isinstance(weight := getattr(part, "weight", None), nn.Parameter):
                nn.init.ones_(weight)
        last_norm(self.target, self.network.norm)
        self.register_buffer("head", self.head_rows(), persistent=False)
        self.measured = own.block_size - 1

    @property
    def read_layers(self) -> Sequence[int]:
        ids: list[int] = self.config_json["aux_hidden_state_layer_ids"]
        return ids

    def guesses(self, tokens: Tensor, features: Tensor, spans: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        size, B, m = self.settings.block_size, len(tokens), self.settings.anchors
        share = torch.rand(B, m) if self.training else ((torch.arange(m) + 0.5) / m).expand(B, m)
        first = spans[:, :1] + 1 + (share.to(spans.device) * (spans[:, 1:] - spans[:, :1])).long()  # of each block
        block = torch.full((B, m, size), self.config_json["mask_token_id"], device=tokens.device)
        block[..., 0] = tokens.gather(1, first)
        context = self.network.context(features, first.new_zeros(B))
        embedded = self.target.get_input_embeddings()(block.flatten(1))
        states = self.network(embedded, context, first).unflatten(1, (m, size))
        for k in range(1, size):
            yield first - 1, F.linear(states[:, :, k], self.head)

    def tensors(self) -> Mapping[str, Tensor]:
        head = {} if self.all_tokens else {"lm_head.weight": self.head}
        return {**self.network.state_dict(), **head}
