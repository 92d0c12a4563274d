"""Base classes of peers: other engines that decode the same prompts in the same process, for comparison."""

from abc import ABC, abstractmethod
from collections import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from specbench.settings import Component

if TYPE_CHECKING:
    from specbench.decoding.sequence import Sequence
    from specbench.models.context import Context
    from specbench.models.language_model import LanguageModel


@dataclass(frozen=True)
class PeerOutput:
    """One prompt, decoded by a peer."""

    tokens: list[int]  # all new tokens
    decoded: int  # tokens after the first step, which reads the prompt
    decode_seconds: float  # without the first step


class Peer(ABC):
    """One way in which another engine decodes."""

    columns = 0  # tokens of the longest text of the run, from warm-up on: a cache of one size is compiled for once

    @abstractmethod
    def decode(self, sequence: "Sequence") -> PeerOutput:
        """Decodes one prompt. May raise any exception, which is then the peer's result for that prompt."""

    def decode_all(self, sequences: "abc.Sequence[Sequence]") -> list[PeerOutput | Exception]:
        """Decodes the prompts of a batch, one after another: of each the output, or why there is none. An error of
        another engine, whatever it is, is the peer's alone."""
        found: list[PeerOutput | Exception] = []
        for sequence in sequences:
            try:
                found.append(self.decode(sequence))
            except Exception as error:
                found.append(error)
        return found


class Peers(Component, ABC):
    """The group `peers`: what a run is compared with, besides its own plain decoding."""

    loads_models: ClassVar[bool] = False  # whether it may need the weights a second time

    @classmethod
    @abstractmethod
    def from_settings(
        cls, settings: Any, context: "Context", target: "LanguageModel", drafter: "LanguageModel | None", gamma: int
    ) -> "Peers":
        """Builds the peers for this target; `drafter` is the drafter's first model, if it has one."""

    @abstractmethod
    def by_name(self) -> Mapping[str, Peer]:
        """The peers by name, as in results.json."""


class NoPeers(Peers):
    """The empty set of peers."""

    @classmethod
    def from_settings(cls, settings: Any, *built: Any) -> "NoPeers":
        return cls()

    def by_name(self) -> Mapping[str, Peer]:
        return {}
