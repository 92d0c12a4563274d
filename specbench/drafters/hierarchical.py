"""A drafter that is itself decoded speculatively, with a cheaper drafter below it, to any depth (section 6)."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from specbench.decoding.draft import Draft, Scores, Verdict
from specbench.decoding.noise import PROPOSAL, STREAM, STREAMS, renew, sibling_bits
from specbench.decoding.rows import Rows, window
from specbench.decoding.speculative import decode_speculative
from specbench.decoding.state import State
from specbench.decoding.timer import Clock
from specbench.decoding.transfers import counts
from specbench.drafters.base import Drafter
from specbench.drafters.model import ModelSettings, load_drafter
from specbench.errors import ConfigError
from specbench.models.language_model import LanguageModel
from specbench.models.load import Context
from specbench.policies.base import FixedGamma, GammaPolicy
from specbench.settings import LARGEST_GAMMA, BaseSettings, Choice, chosen
from specbench.verifiers.base import SpeculativeVerifier


class HierarchicalDrafter(Drafter):
    """Draws guesses from M_q by Algorithm 1, with M_q as the target of the drafter `below`. The inner decoding is
    exact, so q is M_q's own distribution and the outer decoding stays exact."""

    reads_text = False

    class Settings(ModelSettings):
        below: Any = Field(description="a drafter")
        below_gamma: int = Field(ge=1, le=LARGEST_GAMMA)

        def check(self, prefix: str) -> None:
            super().check(prefix)
            inner = self.inner
            if (branches := inner.kind.branches(inner.settings)) or inner.kind.needs_prompt_hidden:
                wanted = "a drafter of chains" if branches else "one that needs no hidden states of prompts"
                raise ConfigError(
                    f"{prefix}below._target_={self.below['_target_']} is not possible: it must be {wanted}"
                )

        @property
        def inner(self) -> Choice:
            """The class and the settings of the drafter below. Raises ConfigError."""
            return chosen(self.below, "drafter.below", Drafter)

        def models(self) -> Sequence[BaseSettings]:
            return [self, *self.inner.settings.models()]

    @classmethod
    def nodes(cls, settings: Settings, gamma: int) -> int:
        return gamma + settings.below_gamma  # the last inner round may draft beyond gamma

    def __init__(self, model: LanguageModel, below: Drafter, below_gamma: int, vocab_size: int):
        """`vocab_size` is the target's V."""
        self.model, self.below, self.vocab_size = model, below, vocab_size
        self.models = [model, *below.models]
        self.policy = FixedGamma(below_gamma)
        self.judge = SpeculativeVerifier(model.sampling)
        self.context = min(model.context, below.context)
        self.operations_per_token = model.operations_per_token
        self.rows: Rows | None = None  # of the inner state; they stay where they are

    @classmethod
    def from_settings(cls, settings: Any, context: Context, target: LanguageModel) -> "HierarchicalDrafter":
        model = load_drafter(settings, context, target)
        if model.encoder is not None and not settings.inner.kind.with_encoders:
            raise ConfigError(f"drafter.below._target_={settings.below['_target_']} is not possible with an encoder")
        own = replace(settings.own(context), gamma=settings.below_gamma)
        try:
            below = settings.inner.build(own, model)
        except ConfigError as error:  # with the keys of the one below; values, as paths, stay
            sentence = re.sub(r"(?<![\w./-])drafter\.(?=[a-z_]+)", "drafter.below.", str(error))
            raise ConfigError(sentence) from error
        return cls(model, below, settings.below_gamma, target.vocab_size)

    def begin(self, state: State, stop: GammaPolicy | None = None) -> None:
        self.model.allocate(state.batch_size, state.tokens.shape[1])
        if self.rows is None or self.rows.tokens.shape != state.tokens.shape:
            rows = Rows(*(t.clone() for t in vars(state.rows).values()))
            self.rows = replace(rows, stop_tokens=rows.stop_tokens[:0])
        self.inner = State(self.rows)
        self.below.begin(self.inner)

    def propose(self, state: State, gamma: list[int]) -> Draft:
        steps = max(gamma)
        self.model.cached = [min(c, n - 1) for c, n in zip(self.model.cached, state.lengths, strict=True)]
        if steps == 0:
            return Draft.empty(state.batch_size, state.tokens.device)
        self._copy(state, gamma)
        self.model.catch_up(self.inner, 1)
        qs = torch.zeros(state.batch_size, steps + 1, self.vocab_size, device=state.tokens.device)

        def keep_qs(inner: State, scores: Scores, draft: Draft, verdict: Verdict, kept: Tensor) -> None:
            p = scores.p
            places = torch.arange(p.shape[1], device=p.device)
            at = inner.length - kept - state.length
            at = torch.where(places < kept[:, None], at[:, None] + places, steps)  # column `steps`: not kept
            qs.scatter_(1, at[..., None].expand(p.shape), p)

        decode_speculative(self.inner, self.model, self.below, self.policy, self.judge, Clock(), keep_qs, begin=False)
        ends = zip(self.inner.lengths, self.model.cached, gamma, strict=True)
        self.model.cached = [length - 1 if g else cached for length, cached, g in ends]
        tokens = window(self.inner.tokens, state.length, steps)
        q = None if self.model.sampling.greedy else qs[:, :steps]
        return Draft.chain(tokens, q, counts(tuple(gamma), tokens.device))

    def rollback(self, state: State, draft: Draft, verdict: Verdict, scores: Scores, root: Tensor) -> None:
        """What the drafter below knows may follow from guesses that were discarded: the next ones have new noise."""
        renew(state.noise[PROPOSAL], state.rows.done)

    def _copy(self, state: State, gamma: list[int]) -> None:
        """Resets the inner state to the outer one, with limit length + gamma[b] and noise of its own."""
        inner, length = self.inner, state.length
        inner.tokens.copy_(state.tokens)
        inner.length.copy_(length)
        more = counts(tuple(gamma), length.device)
        inner.rows.limit.copy_(length + more)
        inner.rows.done.copy_(more == 0)
        streams = torch.arange(1, STREAMS + 1, device=length.device)[:, None, None] * -STREAM
        width = max(gamma) + self.policy.largest + 1
        columns = (length[:, None] + torch.arange(width, device=length.device)).clamp(max=state.tokens.shape[1] - 1)
        fresh = sibling_bits(state.noise[PROPOSAL].gather(1, columns), streams)
        inner.noise.scatter_(2, columns.expand(STREAMS, -1, -1), fresh)
        inner.sequences = [
            None if s is None else replace(s, tokens=list(s.tokens), limit=len(s.tokens) + g, active=g > 0)
            for s, g in zip(state.sequences, gamma, strict=True)
        ]
