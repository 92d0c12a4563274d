"""`baseline=autoregressive`: our own plain decoding, which is always there, and nobody else's."""

from collections.abc import Mapping
from typing import Any

from specbench.context import Context
from specbench.models.language_model import LanguageModel
from specbench.peers.peer import Peer, Peers


class NoPeers(Peers):
    """No peer."""

    @classmethod
    def from_settings(
        cls, settings: Any, context: Context, target: LanguageModel, drafter: LanguageModel | None, gamma: int
    ) -> "NoPeers":
        return cls()

    def by_name(self) -> Mapping[str, Peer]:
        return {}
