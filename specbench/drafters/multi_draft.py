"""Several drafts side by side (SpecInfer): of several models, of several samples of one model, or both."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from specbench.decoding.draft import Draft, Scores, Verdict
from specbench.decoding.state import State
from specbench.decoding.token_tree import ROOT, depths
from specbench.decoding.transfers import constant, upload
from specbench.decoding.verify_tree import follow
from specbench.drafters.base import Drafter, OwnSampling
from specbench.drafters.tree import TreeDrafter
from specbench.drafters.tree_shapes import FixedTree
from specbench.errors import ConfigError, shown
from specbench.models.language_model import LanguageModel
from specbench.models.load import Context, PretrainedModel
from specbench.policies.base import GammaPolicy

MOST_MODELS = 16


class MultiDrafter(Drafter):
    """Draws `samples` independent chains from each model. The target reads them as one prefix tree, in which guesses
    that spell the same text share a place (SpecInfer). A verifier tries the guesses that follow one text in the order
    of `paths`: each is an independent draw from the q that stays with it."""

    trees = True

    class Settings(OwnSampling):
        paths: list[str]
        samples: int = Field(ge=1, le=1000)
        trust_remote_code: bool = False

        def models(self) -> Sequence[PretrainedModel.Settings]:
            made = partial(PretrainedModel.Settings, weights="pretrained", chat_template="never")
            return [made(path=path, trust_remote_code=self.trust_remote_code) for path in self.paths]

        def check(self, prefix: str) -> None:
            if not self.paths:
                raise ConfigError(f"{prefix}paths=[] is not allowed: give at least one model")
            if len(self.paths) > MOST_MODELS:
                raise ConfigError(f"{prefix}paths={shown(self.paths)} is not allowed: at most {MOST_MODELS} models")
            for model in self.models():
                try:
                    model.check(prefix)
                except ConfigError as error:
                    raise ConfigError(str(error).replace("path=", "paths=", 1)) from error

    @classmethod
    def nodes(cls, settings: Settings, gamma: int) -> int:
        return settings.samples * len(settings.paths) * gamma

    def __init__(self, models: Sequence[LanguageModel], samples: int, vocab_size: int, gamma: int):
        """`vocab_size` is the target's V; `gamma` is the usual gamma."""
        self.models = models
        greedy = models[0].sampling.greedy  # K samples of an argmax are one
        shape = partial(FixedTree, [1 if greedy else samples], "best" if greedy else "independent")
        self.drafters = [TreeDrafter(model, vocab_size, gamma, shape(stream)) for stream, model in enumerate(models)]
        if len(models) > 1:  # all accepted guesses may be another model's
            for drafter in self.drafters:
                drafter.reread = gamma + 2
        self.context = min(model.context for model in models)
        self.operations_per_token = sum(model.operations_per_token for model in models) * samples
        self.drafts: list[Draft] = []

    @classmethod
    def from_settings(cls, settings: Any, context: Context, target: LanguageModel) -> "MultiDrafter":
        own = settings.own(context)
        models = [PretrainedModel(model, own, "drafter", target.vocab_size) for model in settings.models()]
        return cls(models, settings.samples, target.vocab_size, context.gamma)

    def begin(self, state: State, stop: GammaPolicy | None = None) -> None:
        for drafter in self.drafters:
            drafter.widths = self.widths
            drafter.begin(state)

    def propose(self, state: State, gamma: list[int]) -> Draft:
        self.drafts = [drafter.propose(state, gamma) for drafter in self.drafters]
        return join_drafts(self.drafts)

    def rollback(self, state: State, draft: Draft, verdict: Verdict, scores: Scores, root: Tensor) -> None:
        """Each model keeps what its cache holds of the accepted path, and reads the rest before its next draft."""
        steps = torch.arange(verdict.tokens.shape[1], device=root.device)
        accepted = torch.where(steps < verdict.accepted[:, None], verdict.tokens, -1)
        for drafter, own in zip(self.drafters, self.drafts, strict=True):
            walked = follow(own, lambda node, depth: accepted[:, depth])
            drafter.rollback(state, own, walked, scores, root)
            if len(self.drafters) > 1:
                known = (root + 1 + walked.accepted).tolist()  # tokens
                drafter.model.cached = [min(c, k) for c, k in zip(drafter.model.cached, known, strict=True)]


def join_drafts(drafts: Sequence[Draft]) -> Draft:
    """Joins drafts of the same rows and depth to one tree; at each depth the first draft's guesses come first."""
    if len(drafts) == 1 or not drafts[0].tokens.shape[1]:
        return drafts[0]
    depth = [depth for draft in drafts for depth in depths(draft.levels)]
    order = sorted(range(len(depth)), key=depth.__getitem__)  # by new column the old one
    B, device = len(drafts[0].tokens), drafts[0].tokens.device
    index = constant(upload)(tuple(order), device)
    # By old node the new one; the root stays.
    node = constant(upload)((ROOT, *(order.index(column) + 1 for column in range(len(order)))), device)
    begins = accumulate([0, *(draft.tokens.shape[1] for draft in drafts[:-1])])
    parents = [
        torch.where(draft.parents > ROOT, node[draft.parents.clamp(min=ROOT) + begin], draft.parents).expand(B, -1)
        for draft, begin in zip(drafts, begins, strict=True)
    ]
    probs = [draft.probs for draft in drafts if draft.probs is not None]
    return dataclasses.replace(
        drafts[0],
        tokens=torch.cat([draft.tokens for draft in drafts], 1)[:, index],
        levels=tuple(map(sum, zip(*(draft.levels for draft in drafts), strict=True))),
        parent=torch.cat(parents, 1)[:, index],
        probs=torch.cat(probs, 1)[:, index] if probs else None,
        count=torch.stack([draft.count for draft in drafts]).sum(0),
        repeats=True,
    )
