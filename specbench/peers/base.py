"""Base classes of peers: other engines that decode the same prompts in the same process, for comparison."""

from abc import ABC, abstractmethod
from collections import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specbench.errors import causes
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

    def decode_all(self, sequences: "abc.Sequence[Sequence]") -> list[dict[str, Any]]:
        """What records keep of a batch, whose prompts are decoded one after another: of each the output, or why there
        is none. An error of another engine, whatever it is, is the peer's alone."""
        found: list[dict[str, Any]] = []
        for sequence in sequences:
            try:
                output = self.decode(sequence)
                found.append({"tokens": output.decoded, "seconds": output.decode_seconds, "ids": output.tokens})
            except Exception as error:
                found.append({"error": causes(error)})
        return found


class Peers(Component):
    """The group `peers`: what a run is compared with, besides its own plain decoding. This is the empty set."""

    @classmethod
    def from_settings(
        cls, settings: Any, context: "Context", target: "LanguageModel", drafter: "LanguageModel | None", gamma: int
    ) -> Mapping[str, Peer]:
        """The peers for this target by name, as in results.json; `drafter` is the drafter's first model, if any."""
        return {}
