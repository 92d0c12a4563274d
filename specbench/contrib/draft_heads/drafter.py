"""The drafter of speculators: guess after guess from a state that begins as the target's last hidden state."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from specbench.component import Selections
from specbench.contrib.draft_heads.speculator import Speculator, read_speculator
from specbench.decoding.draft import Draft
from specbench.decoding.noise import PROPOSAL
from specbench.decoding.rows import Rows, last_tokens, seen_tokens, window
from specbench.decoding.sampling import Sampling, draw
from specbench.decoding.state import State
from specbench.decoding.transfers import counts
from specbench.drafters.blockwise import BlockwiseDrafter
from specbench.drafters.sampling_overrides import OwnSampling
from specbench.models.checkpoint import MODEL
from specbench.models.context import Context
from specbench.models.language_model import LanguageModel
from specbench.models.published import load_network, refuse_network
from specbench.models.trained_parts import PartSettings
from specbench.settings import setting


class SpeculatorDrafter(BlockwiseDrafter):
    """Draws guess k from q that follows from the hidden state from which the last round drew its last token, from that
    token, and from the guesses before k. In a row's first round nothing is drafted, as by `BlockwiseDrafter`."""

    on_device = True

    @dataclass
    class Settings(PartSettings, OwnSampling):
        part, must = "path", MODEL
        path: str = setting(required="a folder or hub id of a speculator")

    @classmethod
    def refuses(cls, settings: Any, run: Selections) -> str | None:
        refuse_network(read_speculator, settings.path, "drafter.path", run)
        return None

    def __init__(self, target: LanguageModel, speculator: Speculator, sampling: Sampling, gamma: int):
        """`gamma` is the usual gamma, whose shapes an executor optimises."""
        self.target, self.speculator, self.sampling = target, speculator, sampling
        self.vocab_size, self.longest, self.gamma = target.vocab_size, speculator.count, gamma
        embedding: Any = target.module.get_input_embeddings()
        speculator.embed = lambda tokens: embedding(target.vocabulary.read(tokens))
        self.own_bytes = target.executor.stored(speculator).held
        last = [list(part.children())[-1] for part in speculator.children()]  # those that later guesses read
        products = [layer for layer in last if not isinstance(layer, nn.Embedding | nn.LayerNorm)]
        self.operations_per_token = sum(target.executor.stored(layer).numbers for layer in products)

    @classmethod
    def from_settings(cls, settings: Any, context: Context, target: LanguageModel) -> "SpeculatorDrafter":
        speculator = load_network(read_speculator, settings.path, "drafter.path", target)
        return cls(target, speculator, settings.own(context).sampling, context.gamma)

    def guesses(self, state: State, gamma: list[int]) -> Draft:
        steps = min(self.steps(gamma), self.longest)
        phase = self.target.executor.phase(self._draft, usual=steps == self.gamma)
        tokens, q = phase(state.rows, self.hidden, steps)
        return Draft.chain(tokens, q, counts(tuple(gamma), tokens.device))

    def _draft(self, rows: Rows, hidden: Tensor, steps: int) -> tuple[Tensor, Tensor | None]:
        """Guesses [B, steps] and their q [B, steps, V], None at temperature 0, from hidden [B, H]."""
        sampling, state = self.sampling, self.speculator.start(hidden)
        bits, last = window(rows.noise[PROPOSAL], rows.length, steps), last_tokens(rows, 1)[0][:, 0]
        seen = None if sampling.repetition_penalty == 1 else seen_tokens(rows.tokens, rows.length, self.vocab_size)
        guesses, laws = [], []
        for number in range(steps):
            logits, state = self.speculator.step(number, state, last)
            if sampling.greedy:
                last = sampling.penalize(logits.float(), seen).argmax(-1)
            else:
                laws.append(sampling.probabilities(logits, seen))
                last = draw(laws[-1], bits[:, number])
            seen = None if seen is None else seen.scatter(1, last[:, None], True)
            guesses.append(last)
        return torch.stack(guesses, 1), torch.stack(laws, 1) if laws else None
