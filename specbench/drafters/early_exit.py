"""The target drafts for itself on its own cache: with its first layers only, or with all layers in 8 or 4 bits."""

from dataclasses import dataclass
from typing import Any

from specbench.drafters.model import ModelDrafter
from specbench.drafters.sampling_overrides import OwnSampling
from specbench.errors import ConfigError
from specbench.executors.quant_grids import GRIDS
from specbench.models.context import Context
from specbench.models.language_model import LanguageModel
from specbench.models.quantization import quantise
from specbench.models.shared_cache import BorrowedCache, first_layers
from specbench.models.trained_parts import ExitHead, Heads, PartSettings, load_part
from specbench.settings import setting


class EarlyExitDrafter(ModelDrafter):
    """Early exit: the target's first layers, with its norm and output matrix and optionally a trained head. They have
    read the text already, and the target's own call overwrites what they store for guesses."""

    reads_text = False
    with_encoders = False
    beside_ranks = False
    with_states = False
    on_device = True
    reread = 1  # in the target's cache only the last committed token is missing

    @dataclass
    class Settings(PartSettings, OwnSampling):
        part = "head"
        layers: int = setting(ge=1, le=10_000)
        head: str | None = setting()

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
            module._modules[own] = ExitHead(head, output)
        name = f"the first {settings.layers} layers"
        model = BorrowedCache(module, target, name, settings.own(context).sampling)
        return cls(model, target.vocab_size, context.gamma)


class SelfQuantizedDrafter(EarlyExitDrafter):
    """All layers in 8 or 4 bits (the idea of QuantSpec, 2502.10424), with the target's embedding: they draft after the
    keys and values that the target stored."""

    on_device = True
    with_encoders = True
    target_copies = 1

    @dataclass
    class Settings(OwnSampling):
        quantization: str = setting(choices=tuple(GRIDS))

    def __init__(self, model: BorrowedCache, vocab_size: int, gamma: int):
        super().__init__(model, vocab_size, gamma)
        embedding: Any = model.module.get_input_embeddings()
        self.own_bytes = model.weight_bytes - embedding.weight.nbytes

    @classmethod
    def from_settings(cls, settings: Any, context: Context, target: LanguageModel) -> "SelfQuantizedDrafter":
        module = target.own_module()
        quantise(module, settings.quantization, "drafter", target.name)
        module.set_input_embeddings(target.module.get_input_embeddings())
        name, sampling = f"{target.name} in {settings.quantization}", settings.own(context).sampling
        model = BorrowedCache(module, target, name, sampling, exact=False)
        return cls(model, target.vocab_size, context.gamma)
