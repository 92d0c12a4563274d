"""DFlash: a published drafter guesses a block of tokens in one pass over masks, beside the target's hidden states."""

from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from specbench.component import Selections
from specbench.contrib.dflash.config import read_dflash
from specbench.contrib.dflash.model import DFlashModel
from specbench.contrib.dflash.weights import load_dflash, refuse_other_target
from specbench.decoding.draft import Draft, Verdict
from specbench.decoding.model import Scores
from specbench.decoding.noise import PROPOSAL
from specbench.decoding.rows import last_tokens, window
from specbench.decoding.sampling import Sampling, draw
from specbench.decoding.state import State
from specbench.decoding.transfers import counts
from specbench.drafters.non_autoregressive import ParallelDrafter
from specbench.drafters.sampling_overrides import OwnSampling
from specbench.models.checkpoint import MODEL, local_path
from specbench.models.context import Context
from specbench.models.heads import PartSettings
from specbench.models.language_model import LanguageModel
from specbench.models.load import load_config
from specbench.models.sizes import column_bytes
from specbench.policies.base import GammaPolicy


class DFlashDrafter(ParallelDrafter):
    """The guesses of a block are independent of each other given the text: q of a draft is the product of the q of its
    guesses, each the distribution that the guess was drawn from, so Algorithm 1 judges them as any chain. With
    DSpark's bias q of a guess depends on the guess before it, and is again what it was drawn from."""

    needs_hidden = True
    listens = True
    with_states = False

    class Settings(PartSettings, OwnSampling):
        part: ClassVar[str] = "path"
        must: ClassVar[str] = MODEL
        path: str = Field(description="a folder or hub id of a DFlash checkpoint")

        def own_bytes(self, target: Any, size: Any, itemsize: int) -> tuple[int, int, int]:
            weights = super().own_bytes(target, size, itemsize)[0]
            if not weights:
                return 0, 0, 0
            config = read_dflash(self.path, "drafter.path")
            own: Any = config.layers
            heard = len(config.ids or range(own.num_hidden_layers)) * own.hidden_size
            return weights, column_bytes(own, itemsize), heard * itemsize

    @classmethod
    def refuses(cls, settings: Any, run: Selections) -> str | None:
        if local_path(settings.path).is_dir():
            target = run["target"].settings
            config = read_dflash(settings.path, "drafter.path")
            refuse_other_target(config, f"drafter.path={settings.path}", target.path,
                                load_config(target, "target").get_text_config())  # fmt: skip
        return None

    def __init__(self, model: DFlashModel, sampling: Sampling, vocab_size: int):
        self.model, self.sampling, self.vocab_size = model, sampling, vocab_size
        self.longest, self.own_bytes = model.config.longest, model.weight_bytes
        rows = model.config.options.block_size / self.longest  # that the network reads per guess
        self.operations_per_token = rows * (model.weights + vocab_size * model.config.layers.hidden_size)

    @classmethod
    def from_settings(cls, settings: Any, context: Context, target: LanguageModel) -> "DFlashDrafter":
        model = load_dflash(settings.path, "drafter.path", read_dflash(settings.path, "drafter.path"), target)
        return cls(model, settings.own(context).sampling, target.vocab_size)

    def begin(self, state: State, stop: GammaPolicy | None = None) -> None:
        self.model.allocate(state.batch_size, state.tokens.shape[1])

    def logits(self, state: State, steps: int) -> Tensor:
        return self.model.vocabulary.fit(self.model.logits(state)[:, :steps].float())

    def guesses(self, state: State, gamma: list[int]) -> Draft:
        if self.model.markov is None:
            return super().guesses(state, gamma)
        logits, seen = self.model.logits(state), self.seen(state)
        last = last_tokens(state.rows, 1)[0][:, 0]
        bits, guesses, laws = window(state.noise[PROPOSAL], state.length, max(gamma)), [], []
        for k in range(max(gamma)):
            own = self.model.vocabulary.fit((logits[:, k] + self.model.markov(last)).float())[:, None]
            if self.sampling.greedy:
                last = self.sampling.penalize(own, seen)[:, 0].argmax(-1)
            else:
                laws.append(self.sampling.probabilities(own, seen)[:, 0])
                last = draw(laws[-1], bits[:, k])
            guesses.append(last)
        q = torch.stack(laws, 1) if laws else None
        return Draft.chain(torch.stack(guesses, 1), q, counts(tuple(gamma), logits.device))

    def rollback(self, state: State, draft: Draft, verdict: Verdict, scores: Scores, root: Tensor) -> None:
        """Hidden states of rejected guesses lie behind the text, where they are overwritten before they are seen."""
        assert scores.hidden is not None
        self.model.take(scores.hidden, root)
