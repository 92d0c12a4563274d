"""Base class of the group `decoding`: what is decoded for a request, one sampled text or what a search finds."""

from collections import abc
from collections.abc import Mapping
from typing import Any, ClassVar

from specbench.decoding.component import Component
from specbench.decoding.model import Model
from specbench.decoding.protocols import GammaPolicy
from specbench.decoding.sequence import Sequence


class Decoding(Component):
    """What a request's text is, by default one sampled from the standardized distribution (section 2.2). A subclass
    that decodes otherwise has `samples` False, and overrides `decode`, `score`, `judge` and `numbers`."""

    samples: ClassVar[bool] = True  # whether Algorithm 1 decodes the run's requests
    generate_settings: tuple[str, ...] = ()  # settings of transformers' generation_config that it applies

    @classmethod
    def from_settings(cls, settings: Any) -> "Decoding":
        return cls(**vars(settings))

    @classmethod
    def target_tokens(cls, settings: Any, nodes: int, gamma: int) -> int:
        """The most tokens that a target call reads, for drafts of at most `nodes` guesses and `gamma` levels."""
        return nodes + 1

    @classmethod
    def spare(cls, settings: Any, nodes: int, gamma: int, new_tokens: int) -> int:
        """Cache columns that a request may need beyond its limit, with `new_tokens` new tokens at most."""
        return nodes + 1

    def refuse_target(self, target: Model) -> None:
        """Raises ConfigError if it cannot decode with this target, which is loaded."""

    def decode(self, parts: Any, jobs: abc.Sequence[Sequence], columns: int, policy: GammaPolicy | None) -> Any:
        """The `DecodeResult` of jobs through one row of `columns` columns, with the drafts of a policy, or plainly
        where it is None. `parts` are the run's `Components`. Called unless it `samples`."""
        raise NotImplementedError

    def score(self, target: Any, result: Any) -> Any:
        """What the stock module of a `LanguageModel` says of a `Result`'s text, for `judge`: an object with `tokens`,
        how many new tokens were read. Called unless it `samples`. Raises MemoryError or RuntimeError."""
        raise NotImplementedError

    def judge(self, record: Any) -> Any:
        """The `Lossless` verdict on a `RunRecord`; None: that on sampled texts."""
        return None

    def numbers(self, results: abc.Sequence[Any], gamma: int, c_hat: float) -> Any:
        """The field `beam` of results.json from the `Result`s of a run with drafts of at most `gamma` levels."""
        return None

    @classmethod
    def pooled_numbers(cls, found: abc.Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
        """The field `beam` of several processes on the same prompts, from that of each."""
        return None


class SamplingDecoding(Decoding):
    """Algorithm 1; plain decoding draws one token per target call."""
