"""The target drafts for itself on its own cache, with its first layers only."""

from typing import Any, ClassVar

from pydantic import Field
from torch import nn

from specbench.drafters.base import OwnSampling
from specbench.drafters.model import ModelDrafter
from specbench.errors import ConfigError
from specbench.models.heads import Heads, PartSettings, load_part
from specbench.models.language_model import BorrowedCache, LanguageModel
from specbench.models.layers import first_layers
from specbench.models.load import Context


class EarlyExitDrafter(ModelDrafter):
    """Early exit: the target's first layers, with its norm and output matrix and optionally a trained head. They have
    read the text already, and the target's own call overwrites what they store for guesses."""

    reads_text = False
    with_encoders = False
    with_states = False
    reread = 1  # in the target's cache only the last committed token is missing

    class Settings(PartSettings, OwnSampling):
        part: ClassVar[str] = "head"
        layers: int = Field(ge=1, le=10_000)
        head: str | None

    @classmethod
    def from_settings(cls, settings: Any, context: Context, target: LanguageModel) -> "EarlyExitDrafter":
        module = first_layers(target.module, settings.layers)
        if settings.head is not None:
            head = load_part(Heads, settings.head, "drafter.head", target)
            if head.config.layers != settings.layers:
                raise ConfigError(
                    f"drafter.layers={settings.layers} is not possible with drafter.head={settings.head}: "
                    f"it was trained for {head.config.layers} layers"
                )
            output: Any = module.get_output_embeddings()  # the target's matrix, which stays as it is
            own = next(name for name, child in module.named_children() if child is output)
            module._modules[own] = nn.Sequential(head, nn.Flatten(-2), output)  # of one head
        name = f"the first {settings.layers} layers"
        model = BorrowedCache(module, target, name, settings.own(context).sampling)
        return cls(model, target.vocab_size, context.gamma)
