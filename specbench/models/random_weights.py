"""Modules with random weights, for timing a shape whose weights are not at hand."""

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig, PreTrainedModel, initialization

from specbench.models.sizes import HALVES

BLOCK = 2**22 + 1  # normal numbers that are drawn; odd: no two of 838,860 rows of usual widths begin at the same one

NORMAL, KAIMING = ("mean", "std"), ("a", "mode", "nonlinearity")
DRAWS = {of.normal_: NORMAL for of in (nn.init, initialization)}  # transformers puts its own in place of torch's
DRAWS |= {of.kaiming_uniform_: KAIMING for of in (nn.init, initialization)}


class RepeatedNormal(TorchFunctionMode):
    """Inside, `torch.nn.init.normal_` and `kaiming_uniform_` copy one block of normal numbers, from a random place on,
    with the mean and deviation that was asked for: drawing billions of them takes minutes on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = torch.randn(BLOCK).repeat(2)  # the block, from any place on

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        words = dict(zip(("tensor", *DRAWS.get(func, ())), args, strict=False)) | (kwargs or {})
        if func not in DRAWS or not words["tensor"].is_contiguous():
            return func(*args, **(kwargs or {}))
        if DRAWS[func] is NORMAL:
            return self._fill(words["tensor"], words.get("mean", 0.0), words.get("std", 1.0))
        fan = nn.init._calculate_correct_fan(words["tensor"], words.get("mode", "fan_in"))
        gain = nn.init.calculate_gain(words.get("nonlinearity", "leaky_relu"), words.get("a", 0))
        return self._fill(words["tensor"], 0.0, gain / math.sqrt(fan))

    @torch.no_grad()
    def _fill(self, tensor: Tensor, mean: float, std: float) -> Tensor:
        """Fills a tensor of any shape."""
        place = int(torch.randint(BLOCK, (1,), device="cpu"))
        own = (self.twice[place : place + min(BLOCK, tensor.numel())] * std + mean).to(tensor)
        for part in tensor.view(-1).split(BLOCK):
            part.copy_(own[: len(part)])
        return tensor


def random_module(loader: Any, config: PretrainedConfig, seed: int, device: torch.device, **options: Any) -> Any:
    """A module of the shape, whose weights follow from `seed`, with the values of the shape's dtype. `options` are
    those of `from_config`."""
    torch.manual_seed(seed)
    with torch.device(device), RepeatedNormal():
        module: PreTrainedModel = loader.from_config(copy.copy(config), **options)
    for weight in module.parameters() if config.dtype in HALVES else ():
        weight.data.copy_(weight.data.to(config.dtype))
    return module
