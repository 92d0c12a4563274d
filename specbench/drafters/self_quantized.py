"""The target's own weights in 8 or 4 bits draft for it, on its cache (the idea of QuantSpec, 2502.10424)."""

from dataclasses import dataclass
from typing import Any

from specbench.drafters.early_exit import EarlyExitDrafter
from specbench.drafters.sampling_overrides import OwnSampling
from specbench.executors.quant_grids import GRIDS
from specbench.models.context import Context
from specbench.models.language_model import LanguageModel
from specbench.models.quantization import quantise
from specbench.models.shared_cache import BorrowedCache
from specbench.settings import setting


class SelfQuantizedDrafter(EarlyExitDrafter):
    """A model drafter that shares the target's embedding and cache: it drafts after the keys and values that the target
    stored, and the target's own call overwrites those that it stores for guesses."""

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
