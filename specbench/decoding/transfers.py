"""Tensors between the host and a device, without a wait of the host for the device where that is possible."""

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor

Made = TypeVar("Made")


def upload(values: Sequence[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Numbers of the host, nested to any depth, as a tensor on a device, for which the host does not wait."""
    if torch.compiler.is_compiling():
        return torch.tensor(values, dtype=dtype, device=device)
    return move(torch.tensor(values, dtype=dtype), device)


@lru_cache(maxsize=256)
def counts(values: tuple[int, ...], device: torch.device) -> Tensor:
    """A number for each row as a tensor [B] on a device, kept for later calls, which nobody may change."""
    return upload(values, device)


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device, from pinned memory, which PyTorch keeps until the device has read it."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def constant(make: Callable[..., Made]) -> Callable[..., Made]:
    """A version of `make` that keeps for good what it made for each set of hashable arguments, since captured graphs
    read it where it is; while a compiler traces, `make` itself."""
    return make if torch.compiler.is_compiling() else _kept(make)


@cache
def _kept(make: Callable[..., Made]) -> Callable[..., Made]:
    return lru_cache(maxsize=None)(make)
