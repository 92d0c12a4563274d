"""What a drafter is: guesses from M_q, with the q that they were drawn from."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from specbench.component import Component
from specbench.decoding.draft import Draft, Verdict
from specbench.decoding.gamma_policy import DraftStop
from specbench.decoding.state import State
from specbench.decoding.target import Model, Scores
from specbench.settings import BaseSettings

UNLIMITED = 2**63 - 1  # the context of a drafter that has no limit of its own


@dataclass
class DrafterSettings(BaseSettings):
    """What can be known of a drafter before it is built."""

    @property
    def point_masses(self) -> bool:
        """Whether its guesses have no law: q is a point mass on each."""
        return False

    def nodes(self, gamma: int) -> int:
        """How many guesses a draft of depth gamma has at most."""
        return gamma


class Drafter(Component, ABC):
    """Guesses tokens for every row of a state.

    `context` is the longest text that it can read, in tokens, and `longest` the most guesses in a row that
    it can make, where there is such a limit. `models` are the language models that read prompts into caches
    of their own.
    """

    Settings: ClassVar[type[DrafterSettings]] = DrafterSettings
    trees: ClassVar[bool] = False  # whether its drafts may branch
    ends_early: ClassVar[bool] = False  # whether a gamma policy may end a draft while it is being drawn
    reads_text: ClassVar[bool] = True  # whether q at a position follows from the text before it alone
    needs_hidden: ClassVar[bool] = False  # whether `settle` reads the target's hidden states

    context: int = UNLIMITED
    longest: int | None = None
    operations_per_token: float = 0
    models: Sequence[Model] = ()

    @classmethod
    def from_settings(cls, settings: Any, context: Any, target: Any) -> "Drafter":
        """Builds it for a target (a `LanguageModel`), where models are run as the `Context` says. By default
        the settings are the constructor's arguments. Raises ConfigError."""
        return cls(**vars(settings))

    def nodes(self, gamma: int) -> int:
        """How many guesses a draft of depth gamma has at most."""
        return gamma

    def begin(self, state: State, stop: DraftStop | None = None) -> None:
        """A new batch of rows; whatever was remembered of the last one is dropped. `stop` is given where a
        policy wants to end drafts early."""

    @abstractmethod
    def propose(self, state: State, gamma: list[int]) -> Draft:
        """Guesses for row b of depth gamma[b] at most, with the q that they were drawn from; where no
        row has a guess, the round is a plain one-token step."""

    def settle(self, state: State, draft: Draft, verdict: Verdict, scores: Scores, base: Tensor) -> None:
        """Called after each round; base [B] is the column of node 0."""

    def fit_probabilities(self, q: Tensor) -> Tensor:
        """q [..., V'] over the vocabulary of its first model as [..., V] over the target's."""
        return q
