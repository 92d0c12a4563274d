"""Base classes of peers: other engines that decode the same prompts, for comparison."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from specbench.decoding import processes
from specbench.decoding.component import Component

if TYPE_CHECKING:
    from specbench.decoding.state import Job
    from specbench.models.context import Context
    from specbench.models.language_model import LanguageModel


@dataclass(frozen=True)
class PeerOutput:
    """One prompt, decoded by a peer. `decoded` and `decode_seconds` leave out the first step, which reads the
    prompt."""

    tokens: list[int] | None  # all new tokens; None if only their text is known
    decoded: int  # tokens after the first step
    decode_seconds: float  # without the first step; of several that are decoded at once, its share
    first: int = 1  # tokens of the first step
    streamed: Any = None  # how the text of a server came, piece by piece

    @property
    def count(self) -> int:
        """The number of all new tokens."""
        return len(self.tokens) if self.tokens is not None else self.first + self.decoded


class Peer(ABC):
    """One way in which another engine decodes."""

    elsewhere: ClassVar[bool] = False  # whether its work is that of another process

    @abstractmethod
    def decode(self, job: "Job") -> PeerOutput:
        """Decodes one prompt. Raises RuntimeError if that fails."""

    def decode_all(
        self, jobs: "Sequence[Job]", at_once: int = 1, arrivals: Sequence[float] | None = None
    ) -> list[PeerOutput | RuntimeError]:
        """Decodes the prompts of a group, of which `at_once` may be decoded together: of each the output, or why there
        is none. `arrivals`, in seconds from now on, are for peers that can be sent prompts over time."""
        return [self._output_or_error(job) for job in jobs]

    def _output_or_error(self, job: "Job") -> PeerOutput | RuntimeError:
        try:
            return self.decode(job)
        except RuntimeError as error:
            processes.current.fail_if_distributed(error)
            return error

    def numbers(self, name: str, results: Sequence[Any], rows: int) -> Any:
        """Its `ServerNumbers`, if it is a server, from a run's `Result`s, in which it has this name and of which `rows`
        were decoded at once."""
        return None

    def notes(self, name: str) -> list[str]:
        """Sentences that a reader of its numbers must know."""
        return []


class Peers(Component, ABC):
    """The group `baseline`: the peers that a run is compared with, besides its own plain decoding."""

    loads_models: ClassVar[bool] = False  # whether it may need the weights a second time
    runs_encoders: ClassVar[bool] = True  # whether the target may be an encoder-decoder

    @classmethod
    def reach(cls, settings: Any) -> None:
        """Finds out whether what is not in this process is there, before any model is loaded. Raises ConfigError."""

    @classmethod
    @abstractmethod
    def from_settings(
        cls, settings: Any, context: "Context", target: "LanguageModel", drafter: "LanguageModel | None", gamma: int
    ) -> "Peers":
        """Builds the peers for this target; `drafter` is the drafter's first model, if it has one."""

    @classmethod
    def pooled_numbers(cls, found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """One peer's `ServerNumbers` of several processes on the same prompts, from each one's in results.json."""
        raise NotImplementedError

    @abstractmethod
    def by_name(self) -> Mapping[str, Peer]:
        """The peers by name, as in the fields of results.json."""
