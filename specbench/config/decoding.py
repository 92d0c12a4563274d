"""What is decoded for a request: one sampled text, or what a search finds (`decoding=`)."""

from collections import abc
from typing import Any, ClassVar

from specbench.settings import Component


class Decoding(Component):
    """A text that is sampled from the standardized distribution (section 2.2): by Algorithm 1, and plainly by one draw
    per target call. A subclass that decodes otherwise has `samples` False, and `decode`, `read` and `results` as
    `beams.beam.BeamDecoding` has them."""

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
