"""A smaller language model drafts autoregressively: the paper's main case (sections 2.1 and 3.6)."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from specbench.decoding.draft import Draft, Scores, Verdict
from specbench.decoding.noise import PROPOSAL
from specbench.decoding.rows import Rows, all_rows, last_tokens, seen_tokens, window
from specbench.decoding.sampling import draw
from specbench.decoding.speculative import accept_and_commit
from specbench.decoding.state import State
from specbench.decoding.timer import Stage
from specbench.decoding.token_tree import Tree
from specbench.decoding.transfers import counts
from specbench.drafters.base import Drafter, OwnSampling
from specbench.errors import ConfigError
from specbench.models.language_model import LanguageModel
from specbench.models.load import Context, PretrainedModel
from specbench.policies.base import GammaPolicy, Signal
from specbench.verifiers.base import Verifier


class ModelSettings(PretrainedModel.Settings, OwnSampling):
    """A checkpoint, and how its logits become q."""


class VocabularySettings(ModelSettings):
    """As `ModelSettings`, of a drafter whose tokenizer may differ from the target's."""

    vocabulary: Literal["same", "intersection"] = "same"


def load_drafter(
    settings: ModelSettings, context: Context, target: LanguageModel, vocabulary: str = "same"
) -> PretrainedModel:
    """Loads the checkpoint, with the drafter's own sampling and the target's V; `vocabulary` "intersection" restricts
    it to the tokens that it shares with the target. Raises ConfigError."""
    model = PretrainedModel(settings, settings.own(context), "drafter", target.vocab_size)
    if vocabulary == "same" or model.tokenizer.get_vocab() == target.tokenizer.get_vocab():
        return model
    from specbench.models.intersection import intersection

    found = intersection(target.tokenizer, model.tokenizer, target.vocab_size, model.own_vocab_size, model.device)
    if model.encoder is not None or not found.shared:
        has_encoder = "an encoder reads the target's tokens as they are"
        raise ConfigError(
            f"drafter.vocabulary=intersection is not possible with target.path={target.name} and drafter.path="
            f"{model.name}: {has_encoder if model.encoder is not None else 'the tokenizers have no token in common'}"
        )
    model.vocabulary = found
    return model


CONTIGUOUS = torch.contiguous_format
Memory = tuple[Tensor | None, ...]  # what a step needs of the one before it, beside the cache


class Inputs(NamedTuple):
    """What the first step of a draft reads."""

    tokens: Tensor  # [b, n]
    first: Tensor  # [b], the position of the first of them
    memory: Memory
    visible: int  # cache columns that attention may read, up to the last step of the draft


class ModelDrafter(Drafter):
    """Samples gamma guesses from M_q autoregressively (Algorithm 1, first step). The first step of a round reads the
    last two committed tokens: if the last round accepted every guess, the last guess is not in the cache yet, and
    reading two in every round keeps the shape fixed. Rows whose cache lacks more than these two are read first.

    A subclass whose model reads more than tokens overrides `prepare`, `read` and `skip_round`."""

    Settings = VocabularySettings
    searches = True
    ends_early = True
    reread = 2  # committed tokens that the first step of a round reads

    def __init__(self, model: LanguageModel, vocab_size: int, gamma: int):
        """`vocab_size` is the target's V; `gamma` is the usual gamma, whose shapes an executor optimises."""
        self.model, self.vocab_size, self.context, self.gamma = model, vocab_size, model.context, gamma
        self.operations_per_token = model.operations_per_token
        self.models = [model] if model.owner is None else []
        self.stop: GammaPolicy | None = None

    @classmethod
    def from_settings(cls, settings: Any, context: Context, target: LanguageModel) -> "ModelDrafter":
        return cls(load_drafter(settings, context, target, settings.vocabulary), target.vocab_size, context.gamma)

    def begin(self, state: State, stop: GammaPolicy | None = None) -> None:
        self.stop = stop
        self.model.allocate(state.batch_size, state.tokens.shape[1])

    def ready(self, state: State, gamma: list[int]) -> list[int]:
        """Called first in a round; returns gamma, 0 in rows for which it cannot draft yet."""
        return gamma

    def propose(self, state: State, gamma: list[int]) -> Draft:
        gamma = self.ready(state, gamma)
        steps = self.steps(gamma)
        if steps == 0:
            self.skip_round(state)
            return Draft.empty(state.batch_size, state.tokens.device)
        return self.drawn(state, gamma, steps)

    def drawn(self, state: State, gamma: list[int], steps: int) -> Draft:
        """A draft of so many steps, at least one."""
        inputs = self.prepare(state, steps)
        if self.stop is not None:
            tokens, q, gamma = self._chain_until(inputs, self.stop, state, gamma)
        else:
            draft = self.model.executor.compiled_whole(self._draft, self.model, usual=steps == self.gamma)
            tokens, q = draft(self.model.rows_of(state), steps, *inputs)
        B = state.batch_size
        q = None if q is None else all_rows(q, B)
        return Draft.chain(all_rows(tokens, B), q, counts(tuple(gamma), tokens.device))

    def whole_round(
        self, state: State, target: LanguageModel, verifier: Verifier, gamma: list[int]
    ) -> tuple[Draft, Scores, Verdict, Tensor] | None:
        if self.trees or self.stop is not None or type(self).propose is not ModelDrafter.propose:
            return None
        gamma = self.ready(state, gamma)
        if (steps := self.steps(gamma)) == 0:
            return None
        inputs, ends = self.prepare(state, steps), max(state.lengths) + steps
        visible = target.rollback_to([n - 1 for n in state.lengths], steps + 1, state.active)
        # Both in one bucket of columns: a graph for each pair of buckets would not be met in warm-up.
        own = max(inputs.visible, self.model.executor.columns(ends, self.model.cache.capacity))
        layers = target.feature_layers if self.needs_hidden else None
        count = counts(tuple(gamma), state.tokens.device)
        one_round = target.executor.compiled(self._round, self.model, target)
        *found, summary = one_round(
            target, verifier, state.rows, steps, inputs._replace(visible=own), visible, count, layers
        )
        state.drawn = steps
        state.read_round(summary)
        return tuple(found)

    def _round(
        self, target: LanguageModel, verifier: Verifier, rows: Rows, steps: int, inputs: Inputs, visible: int,
        count: Tensor, layers: tuple[int, ...] | None,
    ) -> tuple[Draft, Scores, Verdict, Tensor, Tensor]:  # fmt: skip
        """Algorithm 1 as one function: draft, scores, verdict, tokens kept [B], and `summary_of` the round. At most
        `steps` guesses, of which count [B] exist; `layers` are those whose hidden states are kept. The target sees
        `visible` columns."""
        target.executor.mark(Stage.HOST)  # what came before: Python, and the launch of the graph
        x, q = self._draft(rows, steps, *inputs)
        draft = Draft.chain(x, q, count)
        target.executor.mark(Stage.DRAFT)
        p, hidden, logits = target.scored(rows, x, visible, draft.levels, None, layers)
        target.executor.mark(Stage.VERIFY)
        return draft, Scores(p, steps + 1, hidden, None, logits), *accept_and_commit(verifier, p, draft, rows)

    def skip_round(self, state: State) -> None:
        """Called in a round without guesses. Guesses in the cache must not be taken for tokens of a longer text."""
        if self.model.recurrence is not None:
            self.catch_up(state)
        else:
            rows = zip(self.model.cached, state.lengths, strict=True)
            self.model.cached = [min(cached, max(0, length - self.reread)) for cached, length in rows]

    def prepare(self, state: State, steps: int) -> Inputs:
        """Makes the cache ready for so many steps; returns what the first of them reads."""
        width = self.catch_up(state)
        starts = [length - width for length in state.lengths]
        visible = self.model.rollback_to(starts, width + steps - 1, state.active)
        tokens, first = last_tokens(self.model.rows_of(state), width)
        return Inputs(tokens, first, (), visible)

    def catch_up(self, state: State) -> int:
        """Reads committed tokens into the cache but for the last few; returns how many of them the first step reads."""
        width = self.reread if self.model.recurrence is None else 1
        self.model.catch_up(state, width)
        return width

    def read(
        self, x: Tensor, first: Tensor, memory: Memory, visible: int, tree: Tree | None = None
    ) -> tuple[Tensor, Memory]:
        """Logits [b, m, V] after each of the m nodes x [b, m] of a tree, or after the last of the tokens x [b, n] if
        `tree` is None (m = 1); the first of x is at position first [b]. Returns the memory of the next step too,
        tensors [b, m, H] of these nodes."""
        logits = self.model.forward(x, first, visible, tree=tree, keep_logits=0 if tree else 1)
        return logits if tree else logits[:, -1:], ()  # behind an encoder there are those of all tokens

    def _draft(
        self, rows: Rows, steps: int, x: Tensor, first: Tensor, memory: Memory, visible: int,
        signal: Signal | None = None, goes_on: Callable[[Tensor], bool] | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Guesses x_1 .. x_steps [b, steps] and their q [b, steps, V], None at temperature 0 (Algorithm 1). They end
        where `goes_on` of a guess's signal [b] is False."""
        step, sampling = self.model.executor.compiled(self._step, self.model), self.model.sampling
        penalised = sampling.repetition_penalty != 1
        seen = seen_tokens(rows.tokens, rows.length, self.vocab_size)[:, None] if penalised else None
        bits: Sequence[Tensor | None] = [None] * steps
        if not sampling.greedy:  # [steps, b, 1], so that those of each step have the same strides always
            bits = [*window(rows.noise[PROPOSAL], rows.length, steps).T[..., None].clone(memory_format=CONTIGUOUS)]
        guesses: list[Tensor] = []
        qs: list[Tensor] = []
        for i in range(steps):
            x, q_i, found, memory = step(x, first, memory, bits[i], seen, visible, signal)
            if goes_on is not None:  # a CUDA graph of this step overwrites its outputs in the next one
                x, q_i = x.clone(), None if q_i is None else q_i.clone()
                memory = tuple(None if part is None else part.clone() for part in memory)
            guesses.append(x)
            if q_i is not None:
                qs.append(q_i)
            if goes_on is not None and not goes_on(found):
                break
            if seen is not None:
                seen = seen.scatter(2, x[..., None], True)
            first = rows.length + i
        return torch.cat(guesses, 1), torch.cat(qs, 1) if qs else None

    def _chain_until(
        self, inputs: Inputs, stop: GammaPolicy, state: State, gamma: list[int]
    ) -> tuple[Tensor, Tensor | None, list[int]]:
        """As `_draft`, but `stop` may end a row's draft after any of its guesses; returns the number of guesses of each
        row too. It decides from q and guesses that stay in the draft, so the output distribution does not change."""
        count, going = [0] * len(gamma), [wanted > 0 for wanted in gamma]

        def goes_on(signal: Tensor) -> bool:
            nonlocal count, going
            count = [n + on for n, on in zip(count, going, strict=True)]
            more = stop.go_on(state, count, all_rows(signal, state.batch_size).tolist())
            going = [on and m and n < g for on, m, n, g in zip(going, more, count, gamma, strict=True)]
            return any(going)

        tokens, q = self._draft(self.model.rows_of(state), max(gamma), *inputs, stop.signal, goes_on)
        return tokens, q, count

    def _step(
        self, x: Tensor, first: Tensor, memory: Memory, bits: Tensor | None, seen: Tensor | None, visible: int,
        signal: Signal | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Memory]:  # fmt: skip
        """One drafter step after the tokens x [b, n], the first at position first [b], with seen [b, 1, V] bool or None
        and bits [b, 1], None at temperature 0: a guess [b, 1], the q [b, 1, V] that it was drawn from (None at
        temperature 0), its signal [b] for a gamma policy, or None, and the memory of the next step."""
        logits, memory = self.read(x, first, memory, visible)
        sampling = self.model.sampling
        if bits is None:
            logits = sampling.penalize(logits, seen)
            x_i, q_i = logits.argmax(-1), None
            q = logits.softmax(-1) if signal is not None else logits
        else:
            q = q_i = sampling.probabilities(logits, seen)
            x_i = draw(q_i, bits)
        return x_i, q_i, None if signal is None else signal(q[:, 0], x_i[:, 0]), memory
