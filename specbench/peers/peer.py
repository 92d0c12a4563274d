"""What a peer is: somebody else's engine, on the same prompts, for comparison."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from specbench.component import Component
from specbench.context import Context
from specbench.decoding.state import Job
from specbench.models.language_model import LanguageModel


@dataclass(frozen=True)
class PeerOutput:
    """One prompt, decoded by a peer. The step that reads the prompt, and the tokens that come with it, are
    in neither number."""

    tokens: list[int]  # all new tokens
    decoded: int  # those after the first step
    decode_seconds: float


class Peer(ABC):
    """One way of decoding."""

    @abstractmethod
    def decode(self, job: Job) -> PeerOutput:
        """Decodes one prompt. Raises RuntimeError where that fails."""


class Peers(Component, ABC):
    """The group `baseline`: the peers that a run is compared with. Our own plain decoding is always there."""

    loads_models: ClassVar[bool] = False  # whether it may need the weights a second time

    @classmethod
    @abstractmethod
    def from_settings(
        cls, settings: Any, context: Context, target: LanguageModel, drafter: LanguageModel | None, gamma: int
    ) -> "Peers":
        """For this target; `drafter` is the drafter's first model, if it has one."""

    @abstractmethod
    def by_name(self) -> Mapping[str, Peer]:
        """The peers, by the names that their numbers go under."""
