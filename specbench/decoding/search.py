"""Base class of the group `decoding`: what is decoded for a request, one sampled text or the best of several beams."""

from typing import Any

from specbench.component import Component
from specbench.contrib.beams.search_state import BeamRules


class Decoding(Component):
    """Says what a request's text is. `rules` are those of a beam search, None if one text is sampled (section 2.2;
    argmax is sampling at temperature 0)."""

    rules: BeamRules | None = None

    @classmethod
    def from_settings(cls, settings: Any) -> "Decoding":
        """Builds it; by default the settings are the constructor's arguments."""
        return cls(**vars(settings))

    @classmethod
    def target_tokens(cls, settings: Any, nodes: int, gamma: int) -> int:
        """The most tokens that a target call reads; `nodes` is the most guesses that the drafter makes in one round of
        `gamma` levels."""
        return nodes + 1

    @classmethod
    def spare(cls, settings: Any, nodes: int, gamma: int, new_tokens: int) -> int:
        """Cache columns that a request may need beyond its limit, with `new_tokens` new tokens at most."""
        return nodes + 1
