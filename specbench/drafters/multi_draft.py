"""K drafts side by side (SpecInfer): of K models, of K samples of one, or both."""

import dataclasses
from dataclasses import dataclass

import torch

from specbench.context import Context
from specbench.decoding.state import Draft, State, Verdict
from specbench.decoding.tree import levels
from specbench.decoding.verify_tree import follow
from specbench.drafters.standard import OwnSampling, with_own_sampling
from specbench.drafters.tree import TreeDrafter, widths
from specbench.models.language_model import LanguageModel
from specbench.models.pretrained import PretrainedModel
from specbench.settings import ConfigError, setting


class MultiDrafter:
    """`samples` chains of each model in `paths`, drawn independently. The target reads them as one prefix
    tree, in which guesses that say the same share a place."""

    trees = True

    @dataclass
    class Settings(OwnSampling):
        paths: list[str] = setting()
        samples: int = setting(ge=1)

        def models(self) -> list[PretrainedModel.Settings]:
            return [PretrainedModel.Settings(path, weights="pretrained", chat_template="never") for path in self.paths]

        def nodes(self, gamma: int) -> int:
            return self.samples * len(self.paths) * gamma

        def check(self, prefix: str) -> None:
            if not self.paths:
                raise ConfigError(f"{prefix}paths=[] is not allowed: give at least one model")
            for model in self.models():
                model.check(prefix)

    def __init__(self, settings: Settings, context: Context):
        own = with_own_sampling(context, settings)
        models = [PretrainedModel(model, own, role="drafter") for model in settings.models()]
        self._use(models, settings.samples, context.target.vocab_size, context.gamma)

    @classmethod
    def of(cls, models: list[LanguageModel], samples: int, vocab_size: int, gamma: int) -> "MultiDrafter":
        """From models that are already there."""
        drafter = cls.__new__(cls)
        drafter._use(models, samples, vocab_size, gamma)
        return drafter

    def _use(self, models: list[LanguageModel], samples: int, vocab_size: int, gamma: int) -> None:
        self.models, self.samples = models, samples
        self.drafters = [
            TreeDrafter.grown(model, vocab_size, gamma, [samples], "independent", stream)
            for stream, model in enumerate(models)
        ]
        for drafter in self.drafters:
            if drafter.model.sampling.greedy:  # K samples of an argmax are one
                drafter.branching = [1]
            if len(models) > 1:  # the accepted guesses may all be another's
                drafter.reread = gamma + 2
        self.context = min(model.context for model in models)
        self.operations_per_token = sum(model.operations_per_token for model in models) * samples
        self.drafts: list[Draft] = []

    def nodes(self, gamma: int) -> int:
        return sum(len(widths(d.branching, gamma)) * d.branching[0] for d in self.drafters)

    def begin(self, state: State) -> None:
        for drafter in self.drafters:
            drafter.begin(state)

    def propose(self, state: State, gamma: list[int]) -> Draft:
        self.drafts = [drafter.propose(state, gamma) for drafter in self.drafters]
        return side_by_side(self.drafts)

    def settle(self, state: State, draft: Draft, verdict: Verdict, base: torch.Tensor) -> None:
        """Each model keeps what it has of the accepted path; the rest it will read."""
        steps = torch.arange(verdict.tokens.shape[1], device=base.device)
        accepted = torch.where(steps < verdict.accepted[:, None], verdict.tokens, -1)
        for drafter, own in zip(self.drafters, self.drafts, strict=True):
            walked = follow(own, lambda entry, depth: accepted[:, depth])
            drafter.settle(state, own, walked, base)
            if len(self.drafters) > 1:
                known = (base + walked.accepted).tolist()
                drafter.model.cached = [min(c, k) for c, k in zip(drafter.model.cached, known, strict=True)]


def side_by_side(drafts: list[Draft]) -> Draft:
    """Drafts of the same rows and depths as one tree, the first draft's guesses first at each depth."""
    if len(drafts) == 1:
        return drafts[0]
    if not drafts[0].tokens.shape[1]:
        return drafts[0]
    order = sorted(
        (depth, which, node)
        for which, draft in enumerate(drafts)
        for depth, level in enumerate(levels(draft.parent))
        for node in level
    )
    place = {(which, node): i for i, (_, which, node) in enumerate(order)}
    parent = tuple(place.get((which, drafts[which].parent[node]), -1) for _, which, node in order)
    begins = [0]
    for draft in drafts:
        begins.append(begins[-1] + draft.tokens.shape[1])
    index = torch.tensor([begins[which] + node for _, which, node in order], device=drafts[0].tokens.device)
    merged = dataclasses.replace(
        drafts[0],
        tokens=torch.cat([draft.tokens for draft in drafts], 1)[:, index],
        parent=parent,
        probs=None if drafts[0].probs is None else torch.cat([draft.probs for draft in drafts], 1)[:, index],
        count=sum(draft.count for draft in drafts),
        repeats=True,
    )
    return merged
