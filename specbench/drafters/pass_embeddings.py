"""PaSS (Monea et al. 2023): the target guesses its own next tokens in one more pass, with look-ahead embeddings."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specbench.decoding.state import State
from specbench.drafters.non_autoregressive import NonAutoregressiveDrafter
from specbench.drafters.sampling_overrides import OwnSampling
from specbench.models.checkpoint import TRAINED, check_path, local_path
from specbench.models.context import Context
from specbench.models.language_model import LanguageModel
from specbench.models.lookahead_embeddings import LookAhead
from specbench.models.pretrained import load_extras
from specbench.models.shared_cache import BorrowedCache
from specbench.results.fingerprint import of_checkpoint
from specbench.settings import setting


class PassDrafter(NonAutoregressiveDrafter):
    """Shares the target's weights and cache. Its first guess is drawn from p itself; each round costs a second pass of
    the target."""

    reads = 1
    with_states = False
    on_device = True

    @dataclass
    class Settings(OwnSampling):
        lookahead: str = setting(required="a folder of look-ahead embeddings")

        def check(self, prefix: str) -> None:
            check_path(f"{prefix}lookahead", self.lookahead, must=TRAINED)

        def sources(self) -> Mapping[str, str]:
            return {"lookahead": of_checkpoint(local_path(self.lookahead), self.lookahead, None)}

    def __init__(self, model: BorrowedCache, lookahead: LookAhead, vocab_size: int, gamma: int):
        super().__init__(model, lookahead, vocab_size, gamma)
        self.borrowed, self.models = model, []  # it has no model with a cache of its own

    @classmethod
    def from_settings(cls, settings: Any, context: Context, target: LanguageModel) -> "PassDrafter":
        name = f"{target.name} with look-ahead tokens"
        model = BorrowedCache(target.module, target, name, settings.sampling_of(context.sampling))
        lookahead = load_extras(LookAhead, settings.lookahead, "drafter.lookahead", model)
        return cls(model, lookahead, model.vocab_size, context.gamma)

    def _text_width(self, state: State) -> int:
        """Takes the target's cache, in which only the last committed token is missing: returns 1."""
        self.borrowed.borrow()
        return 1
