"""A model that shares layers and cache with another one: early exits, and the target with look-ahead tokens."""

import copy
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from specbench.decoding.sampling import Sampling
from specbench.decoding.state import State
from specbench.errors import ConfigError
from specbench.models.language_model import LanguageModel


class BorrowedCache(LanguageModel):
    """A model that uses its owner's layers and cache, and so reads no prompt of its own."""

    def __init__(
        self, module: PreTrainedModel, owner: LanguageModel, name: str, sampling: Sampling, exact: bool = True
    ):
        super().__init__(
            module, owner.tokenizer, name=name, sampling=sampling, new_cache=owner.new_cache, executor=owner.executor,
            exact=exact, attention=owner.attention if owner.kernel else "sdpa",
        )  # fmt: skip
        self.owner = owner

    def allocate(self, rows: int, columns: int) -> None:
        self.borrow()

    def catch_up(self, state: State, width: int) -> None:
        """Takes the owner's cache, in which only the last committed token is missing."""
        self.borrow()

    def borrow(self) -> None:
        """Takes the owner's cache in its present state."""
        self.cache, self.cached = self.owner.cache, list(self.owner.cached)
        if self.encoder is not None and self.owner.encoder is not None:
            self.encoder.inputs = self.owner.encoder.inputs


def first_layers(module: PreTrainedModel, count: int) -> PreTrainedModel:
    """A Hugging Face causal model that shares the module's weights and ends after `count` layers, with its norm and
    output matrix. Raises ConfigError if the module has no list of its layers, or if `count` is not below their
    number."""
    base_name = module.base_model_prefix
    base: Any = getattr(module, base_name)
    total = module.config.get_text_config().num_hidden_layers
    name = next((n for n, c in base.named_children() if isinstance(c, nn.ModuleList) and len(c) == total), None)
    if name is None:
        raise ConfigError(f"drafter.layers={count} is not possible: {type(module).__name__} has no list of its layers")
    if not 0 < count < total:
        raise ConfigError(f"drafter.layers={count} is not allowed: it must be from 1 to {total - 1}")
    short, short_base = copy.copy(module), copy.copy(base)
    for view in (short, short_base):  # which share their parameters, and whose children can be exchanged
        view._modules = dict(view._modules)
    short_base._modules[name] = nn.ModuleList(list(getattr(base, name))[:count])
    short._modules[base_name] = short_base
    return short
