"""A model that shares layers and cache with another one: early exits, and the target with look-ahead embeddings.

b rows, N new tokens, n columns.
"""

import copy
from typing import Any

from transformers import PreTrainedModel

from specbench.decoding.sampling import Sampling
from specbench.decoding.state import State
from specbench.errors import ConfigError
from specbench.models.hidden_states import decoder_layers
from specbench.models.language_model import LanguageModel


class BorrowedCache(LanguageModel):
    """A model that uses its owner's layers and cache, and so reads no prompt of its own."""

    owner: LanguageModel

    def __init__(self, module: PreTrainedModel, owner: LanguageModel, name: str, sampling: Sampling):
        super().__init__(
            module, owner.tokenizer, name=name, sampling=sampling, new_cache=owner.new_cache, executor=owner.executor,
            attention=owner.attention if owner.kernel or owner.fused is not None else "sdpa",
        )  # fmt: skip
        self.fused = None if owner.fused is None else self.fused  # which was checked
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
    output matrix, and the stock forward. Raises ConfigError if the module has no list of its layers, or if `count` is
    not below their number."""
    try:
        own = decoder_layers(module)
    except ValueError as error:
        raise ConfigError(f"drafter.layers={count} is not possible: {error}") from error
    if not 0 < count < len(own):
        raise ConfigError(f"drafter.layers={count} is not allowed: it must be from 1 to {len(own) - 1}")
    *path, last = next(name for name, part in module.named_modules() if part is own).split(".")
    view: PreTrainedModel = _view_of(module)
    part: Any = view
    for name in path:
        part._modules[name] = _view_of(part._modules[name])
        part = part._modules[name]
    part._modules[last] = own[:count]
    return view


def _view_of(module: Any) -> Any:
    """A module that shares all its parameters with another one, and whose children can be exchanged."""
    view = copy.copy(module)
    view._modules = dict(view._modules)
    vars(view).pop("forward", None)  # an executor's, which runs the other one
    return view
