"""No peers (`baseline=autoregressive`): the run is compared with its own plain decoding only."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from specbench.peers.base import Peer, Peers

if TYPE_CHECKING:
    from specbench.models.context import Context
    from specbench.models.language_model import LanguageModel


class NoPeers(Peers):
    """The empty set of peers."""

    @classmethod
    def from_settings(
        cls, settings: Any, context: "Context", target: "LanguageModel", drafter: "LanguageModel | None", gamma: int
    ) -> "NoPeers":
        return cls()

    def by_name(self) -> Mapping[str, Peer]:
        return {}
