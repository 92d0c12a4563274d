"""Trains what is added to the target, which does not change itself: heads on its hidden states, for Medusa, blockwise
parallel decoding and an early exit, and look-ahead embeddings (PaSS, Monea et al. 2023)."""

from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from specbench.models.heads import Heads, HeadsConfig, LookAhead, LookAheadConfig
from specbench.models.layers import first_layers
from specbench.train.student import Student, StudentSettings, head_input, quoted


class HeadsStudent(Student):
    """Head k predicts, from a hidden state, the token k behind the target's own next one. `drafter`: whose they are."""

    class Settings(StudentSettings):
        heads: int = Field(ge=1, le=1000)
        inner: int | None = Field(ge=1, le=10**5)
        drafter: Literal["medusa", "blockwise"]

        @property
        def ahead(self) -> int:
            return self.heads

    def __init__(self, target: Any, loss: str, settings: Any, model: Any = None):
        super().__init__(target, loss, settings)
        self.part = Heads(HeadsConfig(hidden_size=hidden_size(target), heads=settings.heads, inner=settings.inner))

    @classmethod
    def use(cls, settings: Any, folder: Path) -> list[str]:
        return [f"drafter={settings.drafter}", quoted("drafter.path", folder)]

    def distributions(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        count, output = self.part.config.heads, self.target.get_output_embeddings()
        with torch.no_grad():
            hidden = head_input(self.target, tokens)  # [B, T, H]
            ahead = hidden.unfold(1, count + 1, 1)[..., 1:]  # [B, T - K, H, K], the K positions after each
            p = output(ahead.transpose(2, 3))
        q = output(self.part(hidden[:, :-count]))
        return p.flatten(0, 1), q.flatten(0, 1)


class EarlyExitStudent(Student):
    """One head between the target's own norm and output matrix, after its first `layers` layers."""

    short: Any

    class Settings(StudentSettings):
        layers: int = Field(ge=1, le=10_000)
        inner: int | None = Field(ge=1, le=10**5)

    def __init__(self, target: Any, loss: str, settings: Any, model: Any = None):
        super().__init__(target, loss, settings)
        object.__setattr__(self, "short", first_layers(target, settings.layers))  # the target's own layers
        self.part = Heads(HeadsConfig(hidden_size=hidden_size(target), inner=settings.inner, layers=settings.layers))

    @classmethod
    def use(cls, settings: Any, folder: Path) -> list[str]:
        return ["drafter=early_exit", quoted("drafter.head", folder)]

    def distributions(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        output = self.target.get_output_embeddings()
        with torch.no_grad():
            hidden = head_input(self.short, tokens)
            p = self.target(input_ids=tokens).logits
        return p.flatten(0, 1)[:, None], output(self.part(hidden)).flatten(0, 1)


class LookAheadStudent(Student):
    """Puts look-ahead tokens after every `stride`-th token, all in one pass: each group sees the text before it."""

    class Settings(StudentSettings):
        count: int = Field(ge=1, le=1000)
        stride: int = Field(ge=1, le=10**6)

        @property
        def ahead(self) -> int:
            return self.count

    def __init__(self, target: Any, loss: str, settings: Any, model: Any = None):
        super().__init__(target, loss, settings)
        self.part = LookAhead(LookAheadConfig(hidden_size=hidden_size(target), count=settings.count))

    @classmethod
    def use(cls, settings: Any, folder: Path) -> list[str]:
        return ["drafter=pass_lookahead", quoted("drafter.lookahead", folder)]

    def distributions(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        count, width = self.part.config.count, tokens.shape[1]
        cuts = torch.arange(0, width - count, self.settings.stride, device=tokens.device)  # last token of each context
        steps = torch.arange(1, count + 1, device=tokens.device)
        ahead = self.part.embeddings.repeat(len(cuts), 1).expand(len(tokens), -1, -1)
        # Of text and look-ahead tokens [N]: the last text token that each sees, and its number in its group, 0 of text.
        last = torch.cat([torch.arange(width, device=tokens.device), cuts.repeat_interleave(count)])
        number = torch.cat([last.new_zeros(width), steps.repeat(len(cuts))])
        own = (last == last[:, None]) & (number <= number[:, None])
        logits = self.target(
            inputs_embeds=torch.cat([self.target.get_input_embeddings()(tokens), ahead], 1),
            position_ids=(last + number).expand(len(tokens), -1),
            attention_mask=torch.where(number == 0, last <= last[:, None], own).expand(len(tokens), 1, -1, -1),
        ).logits
        q = logits[:, width:].unflatten(1, (len(cuts), count))
        with torch.no_grad():
            p = self.target(input_ids=tokens).logits[:, cuts[:, None] + steps]
        return p.flatten(0, 1), q.flatten(0, 1)


def hidden_size(target: Any) -> int:
    """The width of the hidden states that the target's output matrix reads."""
    return int(target.get_output_embeddings().weight.shape[1])
