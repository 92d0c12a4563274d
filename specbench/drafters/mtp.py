"""Multi-token prediction: a module that comes with the checkpoint drafts (DeepSeek-V3, 2412.19437, section 2.2)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from specbench.component import Selections
from specbench.decoding.draft import Draft, Verdict
from specbench.decoding.gamma_policy import Signal
from specbench.decoding.model import Scores
from specbench.decoding.rows import Rows
from specbench.decoding.state import State
from specbench.decoding.transfers import upload
from specbench.drafters.model import ModelDrafter
from specbench.drafters.sampling_overrides import OwnSampling
from specbench.models.checkpoint import MODEL
from specbench.models.context import Context
from specbench.models.language_model import LanguageModel
from specbench.models.mtp import MtpModel
from specbench.models.mtp_weights import load_mtp, missing_in, numbers_of
from specbench.models.trained_parts import PartSettings
from specbench.settings import setting


class MtpDrafter(ModelDrafter):
    """The first guess of a round follows from the target's hidden states, the others from the module's own: it is
    applied again for each guess. What it stored for guesses is overwritten by pairs with the target's states."""

    needs_hidden = True
    listens = True
    reads_text = False  # q depends on where the round began
    with_encoders = False
    beside_ranks = False
    with_states = False  # a recurrent target reads its prompt in pieces that are not listened to
    ends_early = True

    @dataclass
    class Settings(PartSettings, OwnSampling):
        part, must = "path", MODEL
        path: str | None = setting()

        def own_bytes(self, target: Any, size: Any, itemsize: int) -> tuple[int, int, int]:
            weights, hidden = numbers_of(self.path or target.path)
            return weights * itemsize, weights and size.column // size.layers, hidden * itemsize

    @classmethod
    def refuses(cls, settings: Any, run: Selections) -> str | None:
        target = run["target"].settings
        if settings.path is None and target.weights == "random":
            return "with target.weights=random, which has no such module: choose target.weights=pretrained"
        return missing_in(settings.path or target.path, "drafter.path" if settings.path else "target.path")

    def __init__(self, model: MtpModel, vocab_size: int, gamma: int):
        super().__init__(model, vocab_size, gamma)
        self.pairs = model
        self.was_active: list[bool] = []  # by row, when the last draft was made

    @classmethod
    def from_settings(cls, settings: Any, context: Context, target: LanguageModel) -> "MtpDrafter":
        key = "target.path" if settings.path is None else "drafter.path"
        path = settings.path or target.name
        module = load_mtp(path, key, target)
        model = MtpModel(module, target, f"{path}'s MTP module", settings.own(context).sampling, context.gamma)
        return cls(model, target.vocab_size, context.gamma)

    def propose(self, state: State, gamma: list[int]) -> Draft:
        self.was_active = list(state.active)
        if None in self.pairs.heard:
            self.pairs.prefill(state)
        return super().propose(state, [g if n > 1 else 0 for g, n in zip(gamma, state.lengths, strict=True)])

    def draft_nothing(self, state: State) -> None:
        """Reads the pending pairs all the same, so that they do not pile up."""
        given, visible = self.prepare(state, 0)
        self.pairs.executor.leaf(self._read, self.pairs)(self.pairs.rows_of(state), *given, visible)

    def prepare(self, state: State, steps: int) -> tuple[tuple[Any, ...], int]:
        visible = self.pairs.make_room_for(state, steps)
        B = len(self.pairs.rows_of(state).length)
        return (self.pairs.pending[:B], self.pairs.behind[:B]), visible

    def settle(self, state: State, draft: Draft, verdict: Verdict, scores: Scores, base: Tensor) -> None:
        assert scores.hidden is not None
        self.pairs.take(scores.hidden, verdict.accepted, upload(self.was_active, scores.hidden.device))

    def _read(self, rows: Rows, pending: Tensor, behind: Tensor, visible: int) -> Tensor:
        """Reads the pending pairs [B, n, H] for later rounds; returns logits [B, V] that nobody uses."""
        tokens, first = self.pairs.first_pairs(rows, behind)
        return self.pairs.predict(tokens, pending, first, behind, visible)[0]

    def first_step(self, rows: Rows, *given: Tensor) -> tuple[Callable[..., Any], Tensor, Tensor]:
        """As that of the base class, for pairs. Each step needs the hidden state of the one before, which the function
        keeps: first pending [B, n, H], up to pair behind [B]."""
        leaf: Callable[..., Any] = self.pairs.executor.leaf(self._pair_step, self.pairs)
        hidden, behind = given
        last: Tensor | None = behind

        def step(
            x: Tensor, first: Tensor, bits: Tensor, seen: Tensor | None, visible: int, signal: Signal | None
        ) -> tuple[Tensor, Tensor | None, Tensor | None]:
            nonlocal hidden, last
            place = first if last is not None else first - 1  # a pair stands where its first token does
            x_i, q_i, found, after = leaf(x, hidden, place, last, bits, seen, visible, signal)
            hidden, last = after[:, None].clone(), None  # a CUDA graph overwrites its outputs in the next step
            return x_i, q_i, found

        return step, *self.pairs.first_pairs(rows, behind)

    def _pair_step(
        self, x: Tensor, hidden: Tensor, first: Tensor, last: Tensor | None, bits: Tensor, seen: Tensor | None,
        visible: int, signal: Signal | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:  # fmt: skip
        """`_step` for pairs of tokens x [B, n] and hidden states [B, n, H], after pair last [B] (None: the last one),
        and the module's hidden state there, [B, H]. first [B], bits [B], seen [B, V] bool or None."""
        logits, after = self.pairs.predict(x, hidden, first, last, visible)
        return *self.guess(logits, bits, seen, signal), after
