"""A smaller language model drafts: the paper's main case."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from specbench.context import Context
from specbench.decoding.draft import Draft
from specbench.decoding.drafter import Drafter
from specbench.decoding.gamma_policy import DraftStop, Signal
from specbench.decoding.noise import PROPOSAL
from specbench.decoding.sampling import draw
from specbench.decoding.state import Rows, State, seen_tokens, window
from specbench.drafters.own_sampling import OwnSampling
from specbench.models.language_model import LanguageModel
from specbench.models.pretrained import PretrainedModel


@dataclass
class ModelSettings(PretrainedModel.Settings, OwnSampling):
    """A checkpoint, and how its logits become q."""


def load_drafter(settings: ModelSettings, context: Context) -> PretrainedModel:
    """The checkpoint, with the drafter's own sampling. Raises ConfigError."""
    return PretrainedModel(settings, settings.own(context), role="drafter")


class ModelDrafter(Drafter):
    """Samples gamma guesses from M_q autoregressively (Algorithm 1, first step).

    The first step of a round reads the last two committed tokens: after a round in which every
    guess was kept, the last guess is not in the cache yet, and reading it always keeps the shape
    fixed. A row whose text is further ahead of the cache is read first.
    """

    Settings = ModelSettings
    ends_early = True
    reread = 2  # committed tokens that the first step of a round reads

    def __init__(self, model: LanguageModel, vocab_size: int, gamma: int):
        """`vocab_size` is the target's, and `gamma` how much will usually be drafted."""
        self.model, self.vocab_size, self.context, self.gamma = model, vocab_size, model.context, gamma
        self.operations_per_token = model.operations_per_token
        self.models = [model]
        self.stop: DraftStop | None = None

    @classmethod
    def from_settings(cls, settings: Any, context: Context, target: LanguageModel) -> "ModelDrafter":
        return cls(load_drafter(settings, context), target.vocab_size, context.gamma)

    def begin(self, state: State, stop: DraftStop | None = None) -> None:
        self.stop = stop
        self.model.allocate(state.batch_size, state.tokens.shape[1])

    def propose(self, state: State, gamma: list[int]) -> Draft:
        steps = max(gamma)
        if steps == 0:
            return Draft.empty(state.batch_size, state.tokens.device)
        width = self._catch_up(state)
        starts = [length - width for length in state.lengths]
        visible = self.model.make_room(starts, width + steps - 1, state.active)
        if self.stop is not None:
            return self._draft_until(self.stop, state, gamma, width, visible)
        phase = self.model.executor.phase(self._draft, self.model, usual=steps == self.gamma)
        tokens, q = phase(state.rows, width, steps, visible)
        return Draft.chain(tokens, q, torch.tensor(gamma, device=tokens.device))

    def _draft(self, rows: Rows, width: int, steps: int, visible: int) -> tuple[Tensor, Tensor | None]:
        """Guesses x_1 .. x_steps [B, steps] and their q [B, steps, V], None at temperature 0."""
        step, x, first, bits, seen = self._first_step(rows, width, steps)
        guesses, laws = [], []
        for i in range(steps):
            x_i, q_i, _ = step(x, first, bits[i], seen, visible, None)
            guesses.append(x_i)
            laws.append(q_i)
            if seen is not None:
                seen = seen.scatter(1, x_i[:, None], True)
            x, first = x_i[:, None], rows.length + i
        return torch.stack(guesses, 1), None if self.model.sampling.greedy else torch.stack(laws, 1)

    def _first_step(
        self, rows: Rows, width: int, steps: int
    ) -> tuple[Callable[..., Any], Tensor, Tensor, Tensor, Tensor | None]:
        """The step, and what the first one takes: tokens [B, width] and where they begin [B], random
        bits of every step [steps, B], and the tokens that the repetition penalty knows [B, V]."""
        text, length = rows.tokens, rows.length
        seen = None if self.model.sampling.repetition_penalty == 1 else seen_tokens(text, length, self.vocab_size)
        first = (length - width).clamp(min=0)  # below 0 only in rows that are idle
        bits = window(rows.noise[PROPOSAL], length, steps).T.clone(memory_format=torch.contiguous_format)
        return self.model.executor.leaf(self._step, self.model), window(text, first, width), first, bits, seen

    def _draft_until(self, stop: DraftStop, state: State, gamma: list[int], width: int, visible: int) -> Draft:
        """As `_draft`, but a row's draft ends when `stop` says so after one of its guesses. It sees q and
        guesses that stay in the draft, so what it decides leaves the law as it is."""
        step, x, first, bits, seen = self._first_step(state.rows, width, max(gamma))
        guesses: list[Tensor] = []
        laws: list[Tensor] = []
        count, going = [0] * len(gamma), [wanted > 0 for wanted in gamma]
        while any(going):
            i = len(guesses)
            x_i, q_i, signal = step(x, first, bits[i], seen, visible, stop.signal)
            x_i = x_i.clone()  # a graph writes its outputs again in the next step
            guesses.append(x_i)
            if q_i is not None:
                laws.append(q_i.clone())
            count = [n + on for n, on in zip(count, going, strict=True)]
            more = stop.go_on(state, count, signal.tolist())
            going = [on and m and n < g for on, m, n, g in zip(going, more, count, gamma, strict=True)]
            if seen is not None:
                seen = seen.scatter(1, x_i[:, None], True)
            x, first = x_i[:, None], state.length + i
        q = torch.stack(laws, 1) if laws else None
        return Draft.chain(torch.stack(guesses, 1), q, torch.tensor(count, device=x.device))

    def _step(
        self, x: Tensor, first: Tensor, bits: Tensor, seen: Tensor | None, visible: int, signal: Signal | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """After the tokens x [B, n]: a guess x_i [B], the q_i [B, V] it was drawn from, and the number [B]
        that a policy wants to know of it."""
        sampling, logits = self.model.sampling, self._fit(self.model.forward(x, first, visible, keep_logits=1)[:, -1])
        if sampling.greedy:
            logits = sampling.penalize(logits, seen)
            x_i = logits.argmax(-1)
            return x_i, None, None if signal is None else signal(logits.softmax(-1), x_i)
        q_i = sampling.probabilities(logits, seen)
        x_i = draw(q_i, bits)
        return x_i, q_i, None if signal is None else signal(q_i, x_i)

    def _catch_up(self, state: State) -> int:
        """Brings every row's cache up to its last committed tokens, of which some, at most two, are left
        for the first step: returns how many."""
        width = min(self.reread, min(length for length, on in zip(state.lengths, state.active, strict=True) if on))
        self.model.catch_up(state, width)
        return width

    def fit_probabilities(self, q: Tensor) -> Tensor:
        return F.pad(q, (0, self.vocab_size - q.shape[-1]))

    def _fit(self, logits: Tensor) -> Tensor:
        """To the target's vocabulary: families pad their embeddings to different sizes."""
        return fit_logits(logits, self.vocab_size)


def fit_logits(logits: Tensor, vocab_size: int) -> Tensor:
    """Logits [..., V'] as [..., V]: tokens that are missing can't be drawn, surplus ones are cut off."""
    missing = vocab_size - logits.shape[-1]
    return F.pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits[..., :vocab_size]
