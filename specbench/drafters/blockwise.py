"""Blockwise parallel decoding (Stern et al. 2018; sections 3.6 and 5): heads on the target's hidden state draft."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specbench.decoding.draft import Draft, Verdict
from specbench.decoding.gamma_policy import GammaPolicy
from specbench.decoding.model import Scores
from specbench.decoding.sampling import Sampling
from specbench.decoding.state import State
from specbench.decoding.transfers import upload
from specbench.drafters.non_autoregressive import ParallelDrafter
from specbench.drafters.sampling_overrides import OwnSampling
from specbench.models.context import Context
from specbench.models.language_model import LanguageModel
from specbench.models.trained_parts import Heads, PartSettings, load_part
from specbench.settings import setting


class BlockwiseDrafter(ParallelDrafter):
    """Draws guess k from the logits of head k on the hidden state from which the last round drew its last token.

    A draft costs no forward pass of any model. In a row's first round there is no hidden state yet, and nothing is
    drafted.
    """

    needs_hidden = True
    on_device = True

    @dataclass
    class Settings(PartSettings, OwnSampling):
        part = "heads"
        heads: str = setting(required="a folder of heads")

    def __init__(self, target: LanguageModel, heads: Heads, sampling: Sampling):
        self.target, self.heads, self.sampling = target, heads, sampling
        self.vocab_size, self.longest = target.vocab_size, heads.config.heads
        self.operations_per_token = (
            sum(p.numel() for p in heads.parameters()) / self.longest + heads.config.hidden_size * target.vocab_size
        )

    @classmethod
    def from_settings(cls, settings: Any, context: Context, target: LanguageModel) -> "BlockwiseDrafter":
        heads = load_part(Heads, settings.heads, "drafter.heads", target)
        return cls(target, heads, settings.sampling_of(context.sampling))

    def begin(self, state: State, stop: GammaPolicy | None = None) -> None:
        self.hidden: Tensor | None = None  # [B, H], from which each row's last committed token was drawn
        self.known: dict[int, int] = {}  # by row, the serial of the request that the hidden state belongs to
        self.was_active: list[bool] = []  # by row, when the last draft was made

    def can_guess(self, state: State) -> list[bool]:
        rows = range(state.batch_size)
        return [self.hidden is not None and self.known.get(row) == state.serials.get(row) for row in rows]

    def logits(self, state: State, steps: int) -> Tensor:
        output: Any = self.target.module.get_output_embeddings()
        logits: Tensor = output(self.heads(self.hidden)[:, :steps])
        return logits.float()

    def settle(self, state: State, draft: Draft, verdict: Verdict, scores: Scores, base: Tensor) -> None:
        new = scores.hidden_after(verdict)
        moved = upload(self.was_active, new.device)[:, None]
        self.hidden = new.clone() if self.hidden is None else torch.where(moved, new, self.hidden)
        self.known |= {row: state.serials[row] for row, on in enumerate(self.was_active) if on}

    def propose(self, state: State, gamma: list[int]) -> Draft:
        self.was_active = list(state.active)
        return super().propose(state, gamma)
