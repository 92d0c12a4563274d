"""A drafter that is itself decoded speculatively, with a cheaper drafter below it; any depth."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from specbench.context import Context
from specbench.decoding.noise import PROPOSAL, STREAMS, sibling_bits
from specbench.decoding.protocols import STREAM, Drafter
from specbench.decoding.speculative import decode_speculative
from specbench.decoding.state import Draft, Rows, State, Verdict, window
from specbench.drafters.standard import OwnSampling, with_own_sampling
from specbench.gamma_policies.fixed import FixedGamma
from specbench.models.language_model import LanguageModel
from specbench.models.pretrained import PretrainedModel
from specbench.settings import ConfigError, nested, setting
from specbench.verifiers.speculative import SpeculativeVerifier


class HierarchicalDrafter:
    """Draws guesses from M_q by Algorithm 1, with M_q as the target of the drafter `below`. The inner
    decoding is exact, so q is M_q's own law, and the outer one stays exact too."""

    reads_text = False

    @dataclass
    class Settings(PretrainedModel.Settings, OwnSampling):
        below: Any = setting(required="a drafter")
        below_gamma: int = setting(ge=1)

        def nodes(self, gamma: int) -> int:
            return gamma + self.below_gamma  # the last inner round may draft beyond

        def check(self, prefix: str) -> None:
            super().check(prefix)
            kind, _ = nested(self.below, f"{prefix}below")
            if getattr(kind, "trees", False):
                name = kind.__module__.rsplit(".", 1)[-1]
                raise ConfigError(f"{prefix}below={name} is not possible: it must be a drafter of chains")

        def models(self) -> list[PretrainedModel.Settings]:
            _, below = nested(self.below, "below")
            return [self, *(below.models() if hasattr(below, "models") else
                            [below] if isinstance(below, PretrainedModel.Settings) else [])]  # fmt: skip

    def __init__(self, settings: Settings, context: Context):
        own = with_own_sampling(context, settings)
        model = PretrainedModel(settings, own, role="drafter")
        kind, below = nested(settings.below, "drafter.below")
        self._use(model, kind(below, replace(own, target=model, gamma=settings.below_gamma)),
                  settings.below_gamma, context.target.vocab_size)  # fmt: skip

    @classmethod
    def of(cls, model: LanguageModel, below: Drafter, below_gamma: int, vocab_size: int) -> "HierarchicalDrafter":
        """From parts that are already there."""
        drafter = cls.__new__(cls)
        drafter._use(model, below, below_gamma, vocab_size)
        return drafter

    def _use(self, model: LanguageModel, below: Drafter, below_gamma: int, vocab_size: int) -> None:
        self.model, self.below, self.vocab_size = model, below, vocab_size
        if model.vocab_size != vocab_size:
            raise ConfigError(
                f"drafter.path={model.name} has {model.vocab_size} tokens in its output, the target {vocab_size}: "
                "drafter=hierarchical needs as many"
            )
        self.models = [model, *getattr(below, "models", [])]
        self.policy = FixedGamma(FixedGamma.Settings(gamma=below_gamma), None)
        self.judge = SpeculativeVerifier.of(model.sampling)
        self.context = min(model.context, below.context)
        self.operations_per_token = model.operations_per_token

    def nodes(self, gamma: int) -> int:
        return gamma + self.policy.largest

    def begin(self, state: State) -> None:
        self.model.allocate(state.batch_size, state.tokens.shape[1])
        rows = Rows(*(t.clone() for t in vars(state.rows).values()))
        self.inner = replace(state, rows=replace(rows, stop_tokens=rows.stop_tokens[:0]), stop_strings=None)
        self.below.begin(self.inner)

    def propose(self, state: State, gamma: list[int]) -> Draft:
        steps = max(gamma)
        if steps == 0:
            return Draft.empty(state.batch_size, state.tokens.device)
        self._copy(state, gamma)
        self.model.cached = [min(c, n - 1) for c, n in zip(self.model.cached, state.lengths, strict=True)]
        self.model.catch_up(self.inner, 1)
        laws = torch.zeros(state.batch_size, steps + 1, self.vocab_size, device=state.tokens.device)

        def keep_laws(inner: State, p: Tensor, draft: Draft, verdict: Verdict, kept: Tensor) -> None:
            places = torch.arange(p.shape[1], device=p.device)
            at = inner.length - kept - state.length
            at = torch.where(places < kept[:, None], at[:, None] + places, steps)  # the last one is for the rest
            laws.scatter_(1, at[..., None].expand(p.shape), p)

        decode_speculative(
            self.inner, self.model, self.below, self.policy, self.judge, _NoClock(), keep_laws, begin=False
        )
        ends = zip(self.inner.lengths, self.model.cached, gamma, strict=True)
        self.model.cached = [length - 1 if g else cached for length, cached, g in ends]
        tokens = window(self.inner.tokens, state.length, steps)
        q = None if self.model.sampling.greedy else laws[:, :steps]
        return Draft.chain(tokens, q, torch.tensor(gamma, device=tokens.device))

    def _copy(self, state: State, gamma: list[int]) -> None:
        """The inner state is the outer one, to be continued by gamma[b] tokens, with noise of its own."""
        inner, length = self.inner, state.length
        going = [g > 0 for g in gamma]
        inner.tokens.copy_(state.tokens)
        inner.length.copy_(length)
        inner.rows.limit.copy_(length + torch.tensor(gamma, device=length.device))
        inner.rows.done.copy_(~torch.tensor(going, device=length.device))
        streams = torch.arange(1, STREAMS + 1, device=length.device)[:, None, None] * -STREAM
        reach = max(gamma) + self.policy.largest + 1
        columns = (length[:, None] + torch.arange(reach, device=length.device)).clamp(max=state.tokens.shape[1] - 1)
        fresh = sibling_bits(state.noise[PROPOSAL].gather(1, columns), streams)
        inner.noise.scatter_(2, columns.expand(STREAMS, -1, -1), fresh)
        inner.lengths, inner.limits = list(state.lengths), [n + g for n, g in zip(state.lengths, gamma, strict=True)]
        inner.active, inner.owners = going, list(state.owners)
        inner.serials, inner.prompt_lengths = dict(state.serials), list(state.prompt_lengths)


class _NoClock:
    """The outer clock has the time of the whole draft."""

    def start(self) -> None:
        pass

    def lap(self, name: str) -> None:
        pass
