"""A smaller language model drafts: the paper's main case."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from specbench.context import Context
from specbench.decoding.noise import PROPOSAL
from specbench.decoding.sampling import draw
from specbench.decoding.state import Draft, State
from specbench.measure.timers import Stopwatch
from specbench.models.language_model import LanguageModel
from specbench.models.pretrained import PretrainedModel


class ModelDrafter:
    """Samples gamma guesses from M_q autoregressively (Algorithm 1, first step).

    The first step of a round reads the last two committed tokens: after a round in which every
    guess was kept, the last guess is not in the cache yet, and reading it always keeps the shape
    fixed. The cache of a new prompt is filled when its first guess is asked for.
    """

    @dataclass
    class Settings(PretrainedModel.Settings):
        pass

    def __init__(self, settings: Settings, context: Context):
        self._use(PretrainedModel(settings, context, role="drafter"), context.target.vocab_size)

    @classmethod
    def of(cls, model: LanguageModel, vocab_size: int) -> "ModelDrafter":
        """A drafter from a model that is already there."""
        drafter = cls.__new__(cls)
        drafter._use(model, vocab_size)
        return drafter

    def _use(self, model: LanguageModel, vocab_size: int) -> None:
        self.model, self.vocab_size, self.context = model, vocab_size, model.context
        self.operations_per_token = model.operations_per_token

    def begin(self, state: State, clock: Stopwatch) -> None:
        self.clock = clock
        self.model.allocate(state.batch_size, state.tokens.shape[1])
        self.cached = [0] * state.batch_size  # leading positions of each row that are in the cache

    def propose(self, state: State, gamma: list[int]) -> Draft:
        steps = max(gamma)
        self.cached = [min(n, length - 1) for n, length in zip(self.cached, state.lengths, strict=True)]
        if steps == 0:
            return Draft.empty(state.batch_size, state.tokens.device)
        sampling, noise = self.model.sampling, state.window(state.noise[PROPOSAL], 0, steps)
        x, starts = self._catch_up(state)
        seen = state.seen(self.vocab_size) if sampling.repetition_penalty != 1 else None
        tokens, probs = [], []
        for i in range(steps):
            logits = self._fit(self.model.logits(x, starts)[:, -1])
            if sampling.greedy:
                x_i = sampling.penalize(logits, seen).argmax(-1)
            else:
                q_i = sampling.probabilities(logits, seen)  # [B, V]
                x_i = draw(q_i, noise[:, i])
                probs.append(q_i)
            if seen is not None:
                seen.scatter_(1, x_i[:, None], True)
            tokens.append(x_i)
            x, starts = x_i[:, None], [length + i for length in state.lengths]
        # All guesses but the last are in the cache; the next round knows how many were kept.
        self.cached = [length + steps - 1 for length in state.lengths]
        q = None if sampling.greedy else torch.stack(probs, 1)
        return Draft.chain(torch.stack(tokens, 1), q, torch.tensor(gamma, device=state.tokens.device))

    def _catch_up(self, state: State) -> tuple[Tensor, list[int]]:
        """Brings every row's cache up to its last committed tokens, at most two of which are left
        for the first step: returns those [B, 1 or 2] and where they begin."""
        width = min(2, min(state.lengths))
        if any(length - cached > width for length, cached in zip(state.lengths, self.cached, strict=True)):
            self.model.prefill(state, start=min(self.cached))
            if not any(self.cached):
                self.clock.lap("prefill")
        return state.window(state.tokens, -width, width), [length - width for length in state.lengths]

    def _fit(self, logits: Tensor) -> Tensor:
        """To the target's vocabulary: families pad their embeddings to different sizes."""
        missing = self.vocab_size - logits.shape[-1]
        return F.pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits[..., : self.vocab_size]
