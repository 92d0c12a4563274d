"""A lookup drafts where it promises more than an EAGLE-3 head, else the head drafts."""

from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from specbench.component import Selections
from specbench.contrib.eagle.drafter import Eagle3Drafter, EagleDrafter
from specbench.decoding.draft import Draft, Verdict
from specbench.decoding.model import Scores
from specbench.decoding.state import State
from specbench.drafters.lookup_or_model import LookupOrModelDrafter
from specbench.drafters.suffix import SuffixDrafter
from specbench.drafters.tree_shapes import TreeSettings
from specbench.errors import ConfigError
from specbench.models.context import Context
from specbench.models.language_model import LanguageModel
from specbench.settings import LARGEST_GAMMA, setting


class LookupOrEagle3Drafter(LookupOrModelDrafter):
    """As `LookupOrModelDrafter`, with the head in place of the model. The head reads the target's hidden states of each
    round, whoever drafted."""

    needs_hidden = True
    listens = True
    with_encoders = False

    @dataclass
    class Settings(Eagle3Drafter.Settings, SuffixDrafter.Settings):
        model_gamma: int | None = setting(ge=1, le=LARGEST_GAMMA)
        cost: float = setting(ge=1e-6, le=1000, zero=True)

        def check(self, prefix: str) -> None:
            for field in fields(TreeSettings):
                if getattr(self, field.name) != getattr(TreeSettings(), field.name):
                    raise ConfigError(f"{prefix}{field.name} is not possible with this drafter: its drafts are chains")
            super().check(prefix)

    @classmethod
    def refuses(cls, settings: Any, run: Selections) -> str | None:
        return SuffixDrafter.refuses(settings, run) or Eagle3Drafter.refuses(settings, run)

    def __init__(self, lookup: SuffixDrafter, drafter: EagleDrafter, cost: float):
        super().__init__(lookup, drafter, cost)
        self.notes, self.longest = drafter.notes, drafter.longest

    @classmethod
    def from_settings(cls, settings: Any, context: Context, target: LanguageModel) -> "LookupOrEagle3Drafter":
        head = Eagle3Drafter.from_settings(settings, context, target)  # it reads what a lookup of gamma guesses kept
        found = cls(SuffixDrafter.from_settings(settings, context, target), head, settings.cost)
        found.gamma = min(context.gamma, settings.model_gamma or context.gamma)
        return found

    def settle(self, state: State, draft: Draft, verdict: Verdict, scores: Scores, base: Tensor) -> None:
        self.learn(state)
        self.drafter.settle(state, draft, verdict, scores, base)
