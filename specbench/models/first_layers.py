"""The first layers of a model as a model: same weights, same modelling code, fewer layers."""

import copy
from typing import TypeVar

from torch import nn
from transformers import PreTrainedModel

from specbench.errors import ConfigError

Module = TypeVar("Module", bound=nn.Module)


def first_layers(module: PreTrainedModel, count: int) -> PreTrainedModel:
    """A Hugging Face causal model that shares the module's weights and ends after `count` layers, with its norm and
    output matrix. Raises ConfigError if the module has no list of its layers, or if `count` is not below their
    number."""
    base_name = module.base_model_prefix
    base = getattr(module, base_name)
    total = module.config.get_text_config().num_hidden_layers
    name = next((n for n, c in base.named_children() if isinstance(c, nn.ModuleList) and len(c) == total), None)
    if name is None:
        raise ConfigError(f"drafter.layers={count} is not possible: {type(module).__name__} has no list of its layers")
    if not 0 < count < total:
        raise ConfigError(f"drafter.layers={count} is not allowed: it must be from 1 to {total - 1}")
    short, short_base = _view(module), _view(base)
    short_base._modules[name] = nn.ModuleList(list(getattr(base, name))[:count])
    short._modules[base_name] = short_base
    return short


def _view(module: Module) -> Module:
    """A copy of the module that shares its parameters and whose children can be exchanged."""
    view = copy.copy(module)
    view._modules = dict(module._modules)
    return view
