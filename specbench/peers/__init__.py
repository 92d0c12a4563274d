"""Base class of peers: other engines that decode the same prompts in the same process, for comparison."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from specbench.settings import Component

if TYPE_CHECKING:
    from specbench.models.language_model import LanguageModel
    from specbench.models.load import Context


class Peers(Component):
    """The group `peers`: what a run is compared with, besides its own plain decoding. This is the empty set."""

    @classmethod
    def from_settings(
        cls, settings: Any, context: "Context", target: "LanguageModel", drafter: "LanguageModel | None", gamma: int
    ) -> Mapping[str, Any]:
        """Peers of a target by name, each as `peers.transformers.Generate`; `drafter` is the first model, if any."""
        return {}
