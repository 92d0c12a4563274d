"""Base class of drafters: they propose guesses drawn from M_q, together with q."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from specbench.decoding.draft import Draft, Scores, Verdict
from specbench.decoding.state import State
from specbench.models.language_model import LanguageModel
from specbench.models.load import Context
from specbench.policies.base import GammaPolicy
from specbench.settings import BaseSettings, Component, Temperature, TopK, TopP
from specbench.verifiers.base import Verifier

UNLIMITED = 2**63 - 1  # tokens: the context of a drafter without a limit of its own


class Drafter(Component, ABC):
    """Proposes guesses for every row of a state (the first step of Algorithm 1; kinds of M_q: section 3.6). `context`
    is the longest text that it can read, in tokens. `longest` is the largest gamma that it can draft, None if there is
    no limit. `operations_per_token` is multiply-adds per guess (for c_hat, Definition 3.10). `models` are its language
    models with caches of their own. `own_bytes` is bytes of weights that are not theirs or the target's. With fixed
    shapes, the decoder sets `widths` to the depths that drafts should have."""

    # Whether it is one model that reads text, which may have a recurrent state and (not inherited) a beam search (A.4).
    searches: ClassVar[bool] = False
    ends_early: ClassVar[bool] = False  # whether a gamma policy may stop a draft after any guess
    reads_text: bool = True  # whether q at a position depends only on the text before it
    needs_hidden: ClassVar[bool] = False  # whether `rollback` reads the target's hidden states
    needs_prompt_hidden: ClassVar[bool] = False  # whether it reads the target's hidden states of whole prompts too
    with_encoders: ClassVar[bool] = True  # whether it can draft for an encoder-decoder
    with_states: ClassVar[bool] = True  # whether it can draft for a target with a recurrent state
    trees: bool = False  # whether its drafts may branch
    context: int = UNLIMITED
    longest: int | None = None
    operations_per_token: float = 0
    own_bytes: int = 0
    only_likeliest: bool = False  # whether its guesses are the likeliest tokens of its model, as point masses
    models: Sequence[LanguageModel] = ()
    widths: Sequence[int] = ()

    @classmethod
    def from_settings(cls, settings: Any, context: Context, target: Any) -> "Drafter":
        """Builds the drafter from its settings, the run's `Context` and the target, a `LanguageModel`. By default the
        settings are the constructor's arguments. Raises ConfigError."""
        return cls(**vars(settings))

    @classmethod
    def point_masses(cls, settings: Any) -> bool:
        """Whether q is a point mass on each guess with these settings: the drafter gives no probabilities."""
        return False

    @classmethod
    def refuse_target(cls, settings: Any, target: Any) -> None:
        """Raises ConfigError, before a model is loaded, if the checkpoint in the settings does not fit the target's."""

    @classmethod
    def estimates(cls, settings: Any) -> bool:
        """Whether it estimates, before it draws a guess, the probability that the guess will be accepted."""
        return False

    @classmethod
    def branches(cls, settings: Any) -> bool:
        """Whether its drafts may branch with these settings."""
        return cls.trees

    @classmethod
    def nodes(cls, settings: Any, gamma: int) -> int:
        """The largest number of guesses (nodes) in a draft of depth gamma with these settings."""
        return gamma

    @classmethod
    def candidates(cls, settings: Any, context: Context) -> int:
        """How many guesses those are chosen from; p is stored for each of them."""
        return cls.nodes(settings, context.gamma)

    def begin(self, state: State, stop: GammaPolicy | None = None) -> None:
        """Prepares for a new batch of rows and forgets the last one. `stop` may end drafts early, if given."""

    @abstractmethod
    def propose(self, state: State, gamma: list[int]) -> Draft:
        """Drafts at most gamma[b] levels of guesses for row b. An empty draft makes the round a one-token step."""

    def whole_round(
        self, state: State, target: Any, verifier: Verifier, gamma: list[int]
    ) -> tuple[Draft, Scores, Verdict, Tensor] | None:
        """A round of Algorithm 1 by one call of a captured function: its draft, scores, verdict, and the tokens kept
        [B], which `state` knows too. None, by default, if it has to be several."""
        return None

    def steps(self, gamma: list[int]) -> int:
        """The depth at which to draft gamma[b] levels for row b: the largest of them or, so that few shapes occur, the
        next of `widths`. `count` says how many of the guesses a row has."""
        longest = max(gamma)
        return next((width for width in self.widths if width >= longest > 0), longest)

    def rollback(self, state: State, draft: Draft, verdict: Verdict, scores: Scores, root: Tensor) -> None:
        """Keeps the accepted guesses and forgets the others. root [B]: where the last token before the round stands."""


class OwnSampling(BaseSettings):
    """Settings of drafters that compute q: their own standardization (section 6). Null means the target's."""

    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: TopP | None = None

    def own(self, context: Context) -> Context:
        """The run's context with the drafter's own sampling. Guesses are drawn from this q, so the output stays p."""
        own = {name: getattr(self, name) for name in OwnSampling.model_fields}
        changed = {name: value for name, value in own.items() if value is not None}
        return dataclasses.replace(context, sampling=dataclasses.replace(context.sampling, **changed))
