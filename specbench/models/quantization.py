"""Weight-only quantisation of a loaded module: its linear layers get weights on a grid, the rest stays as it is.

The rounded values are kept in the run's dtype. So the module is an ordinary one, and whoever runs it has the same law;
executors find out by themselves that the weights can be stored in fewer bits.
"""

import dataclasses

from torch import nn
from transformers import PreTrainedModel

from specbench.errors import ConfigError
from specbench.executors.quant_grids import GRIDS
from specbench.executors.quantized_linear import packed_bytes
from specbench.models.architecture import ModelSize

LEAST = 0.5  # of the weights besides the embedding must be in linear layers


def _linear_layers(module: nn.Module) -> dict[str, nn.Linear]:
    return {path: child for path, child in module.named_modules() if type(child) is nn.Linear}


def quantised_size(size: ModelSize, module: PreTrainedModel, kind: str) -> ModelSize:
    """The size of a model that is rounded to the grid of this kind, given its size before and its module."""
    layers, weights = _linear_layers(module).values(), size.weights + size.tied
    few = sum(packed_bytes(GRIDS[kind], layer.out_features, layer.in_features) for layer in layers)
    few += weights - sum(layer.weight.nbytes for layer in layers)
    return dataclasses.replace(size, weights=weights, tied=0, few=few)


def quantise(module: PreTrainedModel, kind: str, role: str, name: str) -> None:
    """Rounds the weights of all linear layers, the output matrix included, to the grid of this kind. An output matrix
    that is also the embedding becomes one of its own; embeddings, norms and biases stay. `name` is the model's. Raises
    ConfigError if that is not possible."""
    grid, refused = GRIDS[kind], f"{role}.quantization={kind} is not possible with {name}"
    layers = _linear_layers(module)
    embedding = module.get_input_embeddings().weight
    others = sum(p.numel() for p in module.parameters() if p is not embedding)
    inside = sum(layer.weight.numel() for layer in layers.values() if layer.weight is not embedding)
    if inside < LEAST * others or not others:
        raise ConfigError(
            f"{refused}: only {inside / max(others, 1):.0%} of its weights are in linear layers, use "
            f"{role}.quantization=null or another model"
        )
    for path, layer in layers.items():
        if not grid.fits(layer.in_features):
            raise ConfigError(
                f"{refused}: {path} has {layer.in_features} inputs, which are no multiple of {grid.group}: use int8"
            )
    for layer in layers.values():
        rounded = grid.rounded(layer.weight.detach())
        layer.weight = nn.Parameter(rounded, requires_grad=layer.weight.requires_grad)
