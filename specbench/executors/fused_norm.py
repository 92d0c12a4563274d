"""RMS norms as one kernel each. transformers writes them as eight operations, which on a GPU are as many kernels."""

import inspect
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

ROUNDINGS = 4.0  # of the largest result, by which two that compute the same may differ
SHAPE = (4, 64)  # of the random numbers on which they are compared


class FusedNorm(nn.Module):
    """Takes the place of an RMS norm of transformers, whose weight [H] it has."""

    def __init__(self, weight: nn.Parameter, eps: float):
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H] to [..., H], rounded once."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def fused_norms(module: nn.Module, dtype: torch.dtype) -> Iterator[tuple[nn.Module, str, FusedNorm]]:
    """Parent, name and replacement of each norm of weights of this dtype that computes what PyTorch's own does, as
    those of Llama and Qwen do; that of Gemma, which adds 1 to its weight, does not."""
    for parent in module.modules():
        for name, norm in parent.named_children():
            eps: Any = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
            weights = dict(norm.named_parameters())
            named = type(norm).__name__.endswith("RMSNorm") and [*weights] == ["weight"] and isinstance(eps, float)
            if named and is_as_written(norm) and weights["weight"].dtype == dtype:
                kind: Any = type(norm)
                if computes_rms_norm(kind, eps):
                    yield parent, name, FusedNorm(weights["weight"], eps).train(norm.training)


def is_as_written(norm: nn.Module) -> bool:
    """Whether nothing was added to a module of one input: no hook, no other `forward`, no weight of other tensors."""
    hooks = norm._forward_hooks or norm._forward_pre_hooks or "forward" in vars(norm)
    one_input = len(inspect.signature(type(norm).forward).parameters) == 2
    consists = any(hasattr(weight, "__tensor_flatten__") for weight in norm.parameters())
    return not hooks and one_input and not consists


@cache
def computes_rms_norm(kind: Any, eps: float) -> bool:
    """Whether a class of norms gives on random numbers, in float32, what PyTorch's own gives."""
    with torch.no_grad(), _disable_current_modes(), torch.device("cpu"):
        generator = torch.Generator().manual_seed(0)
        x, weight = torch.randn(SHAPE, generator=generator), torch.randn(SHAPE[1], generator=generator)
        try:
            norm = kind(SHAPE[1], eps=eps)
            norm.weight.copy_(weight)
            theirs = norm(x)
        except Exception:  # of a norm of another form, maybe from a checkpoint
            return False
        ours = F.rms_norm(x, weight.shape, weight, eps)
        close = ROUNDINGS * torch.finfo(x.dtype).eps * ours.abs().max()
        return theirs.shape == ours.shape and bool((theirs - ours).abs().max() <= close)
