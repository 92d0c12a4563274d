"""What is decoded for a request: one sampled text, or what a search finds (`decoding=`)."""

from collections import abc
from typing import Any, ClassVar

from specbench.decoding.sequence import Sequence
from specbench.settings import Component


class Decoding(Component):
    """A text that is sampled from the standardized distribution (section 2.2): by Algorithm 1, and plainly by one draw
    per target call. A subclass that decodes otherwise has `samples` False, and the methods that raise here."""

    samples: ClassVar[bool] = True
    generate_settings: tuple[str, ...] = ()  # settings of transformers' generation_config that it applies

    @classmethod
    def target_tokens(cls, settings: Any, nodes: int, gamma: int) -> int:
        """The most tokens that a target call reads, for drafts of at most `nodes` guesses and `gamma` levels."""
        return nodes + 1

    @classmethod
    def spare(cls, settings: Any, nodes: int, gamma: int, new_tokens: int) -> int:
        """Cache columns that a request may need beyond its limit, with `new_tokens` new tokens at most."""
        return nodes + 1

    def refuse_models(self, models: abc.Sequence[Any]) -> None:
        """Raises ConfigError if it cannot decode with these models, the target first, which are loaded."""

    def decode(self, parts: Any, jobs: abc.Sequence[Sequence], columns: int, speculative: bool) -> tuple[Any, Any, int]:
        """The `Text` of each job, what the search found, and bytes of the caches."""
        raise NotImplementedError

    def read(self, target: Any, request: Any, ours: Any, plain: Any) -> dict[str, Any]:
        """What the record of a request keeps of the searches of both ways."""
        raise NotImplementedError

    def results(self, records: abc.Sequence[Any], facts: Any, gamma: int, coarse: bool) -> dict[str, Any]:
        """`lossless`, and what else belongs into the details of the results. `coarse`: the target computes in 16
        bits."""
        raise NotImplementedError
