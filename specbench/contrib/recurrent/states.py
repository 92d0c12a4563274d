"""Where the modules of transformers keep a recurrent state: how it is given to a forward, and taken from it.

A state is a dictionary from names to tensors [b, ...], which a forward may overwrite.
"""

import copy
import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel

from specbench.contrib.recurrent.cache import RecurrentCache, States
from specbench.decoding.executor import cache_argument


class StateKeeper(ABC):
    """One way of keeping it."""

    initial: Mapping[str, float] = {}  # what a state that has read nothing is filled with, by name, if it is not 0
    cache_type: type[RecurrentCache] = RecurrentCache
    steps_alone = False  # whether a forward of one token must be of one row

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

    def __init__(self, module: PreTrainedModel, config: PretrainedConfig):
        self.argument = cache_argument(module.forward)
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


class InOutput(StateKeeper):
    """In a list that the forward takes as `state`, changes and returns: RWKV."""

    initial: Mapping[str, float] = {"4": -1e30}  # the logarithm of the largest weight so far
    steps_alone = True  # transformers' RWKV mixes rows: it adds [b, H] to [b, 1, H]

    def give(self, cache: RecurrentCache, states: States | None) -> dict[str, Any]:
        return {"state": None if states is None else list(states.values())}

    def take(self, cache: RecurrentCache, output: Any) -> dict[str, Tensor]:
        return {str(number): state for number, state in enumerate(output.state)}


class InModules(StateKeeper):
    """In attributes of the layers themselves, beside a cache of keys and values: RecurrentGemma."""

    NAMES = ("conv1d_state", "recurrent_states")

    def __init__(self, module: PreTrainedModel):
        self.argument = cache_argument(module.forward)
        self.places = [
            (f"{path}.{name}", part, name)
            for path, part in module.named_modules()
            for name in self.NAMES
            if name in vars(part)
        ]

    def give(self, cache: RecurrentCache, states: States | None) -> dict[str, Any]:
        for key, part, name in self.places:
            setattr(part, name, None if states is None else states[key])
        return {self.argument: cache}

    def take(self, cache: RecurrentCache, output: Any) -> dict[str, Tensor]:
        return {key: getattr(part, name) for key, part, name in self.places}


class InLinearCache(StateKeeper):
    """In a list of a cache of the model's own class, by layer: MiniMax."""

    def __init__(self, module: PreTrainedModel):
        self.argument = cache_argument(module.forward)
        kind = importlib.import_module(type(module).__module__).MiniMaxCache
        # Of its class, because the model asks for that; everything but the list is ours.
        self.cache_type = type(kind.__name__, (LinearLists, kind), {})

    def give(self, cache: RecurrentCache, states: States | None) -> dict[str, Any]:
        assert isinstance(cache, LinearLists)
        cache.lists = {} if states is None else {int(number): state for number, state in states.items()}
        return {self.argument: cache}

    def take(self, cache: RecurrentCache, output: Any) -> dict[str, Tensor]:
        assert isinstance(cache, LinearLists)
        return {str(number): state for number, state in cache.lists.items()}


class LinearLists(RecurrentCache):
    """The part of MiniMax's cache that its recurrent layers call."""

    lists: dict[int, Tensor]  # by layer

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """The state [b, heads, head size, head size] of a layer, if it has one."""
        return self.lists.get(layer_idx)

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """Takes over the state [b, heads, head size, head size] of a layer."""
        self.lists[layer_idx] = linear_cache
