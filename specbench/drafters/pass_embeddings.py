"""PaSS (Monea et al. 2023): the target guesses its own next tokens in one more pass, with look-ahead embeddings."""

from dataclasses import dataclass
from typing import Any

from specbench.drafters.non_autoregressive import NonAutoregressiveDrafter
from specbench.drafters.sampling_overrides import OwnSampling
from specbench.models.context import Context
from specbench.models.language_model import LanguageModel
from specbench.models.shared_cache import BorrowedCache
from specbench.models.trained_parts import LookAhead, PartSettings, load_part
from specbench.settings import setting


class PassDrafter(NonAutoregressiveDrafter):
    """Shares the target's weights and cache. Its first guess is drawn from p itself; each round costs a second pass of
    the target."""

    reads = 1
    with_states = False
    on_device = True

    @dataclass
    class Settings(PartSettings, OwnSampling):
        part = "lookahead"
        lookahead: str = setting(required="a folder of look-ahead embeddings")

    @classmethod
    def from_settings(cls, settings: Any, context: Context, target: LanguageModel) -> "PassDrafter":
        name = f"{target.name} with look-ahead tokens"
        model = BorrowedCache(target.module, target, name, settings.sampling_of(context.sampling))
        lookahead = load_part(LookAhead, settings.lookahead, "drafter.lookahead", model)
        return cls(model, lookahead, model.vocab_size, context.gamma)

    def text_width(self) -> int:
        return 1  # in the target's cache only the last committed token is missing
