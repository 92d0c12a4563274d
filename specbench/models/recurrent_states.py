"""Where the modules of transformers keep a recurrent state: how it is given to a forward, and taken from it.

A state is a dictionary from names to tensors [b, ...], which a forward may overwrite.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import DynamicCache, PretrainedConfig

from specbench.cache.recurrent import RecurrentCache, States


class StateKeeper(ABC):
    """One way of keeping it."""

    initial: Mapping[str, float] = {}  # what a state that has read nothing is filled with, by name, if it is not 0
    cache_type: type[RecurrentCache] = RecurrentCache

    @abstractmethod
    def give(self, cache: RecurrentCache, states: States | None) -> dict[str, Any]:
        """Prepares a forward that begins with these states [b, ...] (None: it begins its texts). Returns arguments of
        the forward."""

    @abstractmethod
    def take(self, cache: RecurrentCache, output: Any) -> dict[str, Tensor]:
        """The states [b, ...] after the forward that returned `output`."""


class InCache(StateKeeper):
    """In the layers of transformers' cache, as its linear-attention layers: most models."""

    NAMES = ("conv_states", "recurrent_states")  # of a layer's dictionaries from numbers to tensors

    def __init__(self, config: PretrainedConfig, argument: str):
        """`argument` is what the forward calls the cache."""
        self.argument = argument
        self.blank: list[Any] = DynamicCache(config=config).layers
        self.used: list[Any] = self.blank

    def give(self, cache: RecurrentCache, states: States | None) -> dict[str, Any]:
        if states is None:
            cache.layers = copy.deepcopy(self.blank)
        else:
            cache.layers = [copy.copy(layer) for layer in self.used]  # with its marks of being initialised
            for index, layer in enumerate(cache.layers):
                for name in self.NAMES:
                    if hasattr(layer, name):
                        numbers = getattr(layer, name)
                        setattr(layer, name, {number: states.get(f"{index} {name} {number}") for number in numbers})
        return {self.argument: cache}

    def take(self, cache: RecurrentCache, output: Any) -> dict[str, Tensor]:
        self.used = cache.layers
        return {
            f"{index} {name} {number}": state
            for index, layer in enumerate(cache.layers)
            for name in self.NAMES
            for number, state in getattr(layer, name, {}).items()
            if state is not None
        }
