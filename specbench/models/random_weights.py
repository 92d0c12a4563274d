"""Modules with random weights, for timing a shape whose weights are not at hand."""

import copy
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from specbench.models.architecture import HALVES

BLOCK = 2**22 + 1  # normal numbers that are drawn; odd: no two of 838,860 rows of usual widths begin at the same one


class RepeatedNormal(TorchFunctionMode):
    """Inside, `torch.nn.init.normal_` copies one block of normal numbers, from a random place on: drawing billions of
    them takes minutes on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.block = torch.randn(BLOCK)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        words = dict(zip(("tensor", "mean", "std"), args, strict=False)) | (kwargs or {})
        if func is not nn.init.normal_ or not words["tensor"].is_contiguous():
            return func(*args, **(kwargs or {}))
        return self._fill(**words)

    @torch.no_grad()
    def _fill(self, tensor: Tensor, mean: float = 0.0, std: float = 1.0, generator: Any = None) -> Tensor:
        """Fills a tensor of any shape."""
        place = int(torch.randint(BLOCK, (1,), device="cpu"))
        own = (self.block.roll(place)[: tensor.numel()] * std + mean).to(tensor)
        for part in tensor.view(-1).split(BLOCK):
            part.copy_(own[: len(part)])
        return tensor


def random_module(loader: Any, config: PretrainedConfig, seed: int, device: torch.device, **options: Any) -> Any:
    """A module of the shape, whose weights follow from `seed`, with the values of the shape's dtype. `options` are
    those of `from_config`."""
    torch.manual_seed(seed)
    with RepeatedNormal():
        once = nullcontext() if options.get("trust_remote_code") else no_init_weights()  # torch's own are replaced
        with torch.device(device), once:
            module: PreTrainedModel = loader.from_config(copy.copy(config), **options)
        module.init_weights()
    for weight in module.parameters() if config.dtype in HALVES else ():
        weight.data.copy_(weight.data.to(config.dtype))
    return module
