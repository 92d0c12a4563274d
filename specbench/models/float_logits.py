"""Logits in float32 of models in 16 bits: the output matrix [V, H] is read as it is, its product is not rounded."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from specbench.executors.half_linear import twin_of
from specbench.models.sizes import HALVES

ROWS = 8192  # of a matrix that are widened at a time


@torch.library.custom_op("specbench::float_product", mutates_args=())
def float_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., H] times weight [V, H], both in 16 bits, as float32 [..., V]."""
    if x.device.type == "cuda":
        return torch.mm(x.flatten(0, -2), weight.t(), out_dtype=torch.float32).view(*x.shape[:-1], len(weight))
    wide = x.float()
    return torch.cat([F.linear(wide, part.float()) for part in weight.split(ROWS)], -1)


@float_product.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight), dtype=torch.float32)


class FloatLinear(nn.Linear):
    """Takes the place of an output matrix in 16 bits."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H] to float32 [..., V]."""
        found: Tensor = float_product(x, self.weight)
        return found if self.bias is None else found + self.bias


def plain_output(module: PreTrainedModel) -> nn.Linear | None:
    """The output matrix of a module, if it is one plain layer in 16 bits whose calls nothing else changes."""
    output = module.get_output_embeddings()
    if type(output) is not nn.Linear or type(output.weight) is not nn.Parameter or output.weight.dtype not in HALVES:
        return None
    changed = "forward" in vars(output) or output._forward_hooks or output._forward_pre_hooks
    return None if changed else output


def with_float_logits(module: PreTrainedModel) -> PreTrainedModel:
    """A copy of a module of the same weights with logits in float32; the module itself if it has no plain output."""
    output = plain_output(module)
    if output is None:
        return module
    found = twin_of(module)
    found.get_output_embeddings().__class__ = FloatLinear
    return found
