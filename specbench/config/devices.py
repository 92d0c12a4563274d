"""Turns the settings `device` and `dtype` into a torch device and dtype."""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from specbench.contrib.tensor_parallel import process_group as ranks
from specbench.errors import ConfigError, shown


def named_device(name: str) -> torch.device:
    """The device that the setting names, which may be another machine's. Raises ConfigError if it names none."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:(0|[1-9][0-9]?))?", name):
        raise ConfigError(f"device={shown(name)} is not allowed: it must be auto, cpu, cuda or cuda:N")
    return torch.device(name)


def pick_device(name: str) -> torch.device:
    """The device that the setting names. A CUDA device becomes the current one, on which streams, events and graphs
    are made; a rank of several takes the one of its number. Raises ConfigError if there is no such device."""
    device = named_device(name)
    if str(device) == "cuda" and ranks.size() > 1:
        device = torch.device("cuda", ranks.local())
    name = str(device)
    if device.type == "cuda" and not (torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()):
        raise ConfigError(f"device={name} is not here: {torch.cuda.device_count()} CUDA devices are visible, use cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
        torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew, for 20 to 40 ms, at every new length of a text
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype that the setting names; `auto` is float32 on a CPU, where 16 bits gain nothing, and bfloat16 on
    CUDA."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def upload(values: Sequence[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Numbers of the host, nested to any depth, as a tensor on a device, for which the host does not wait."""
    if torch.compiler.is_compiling():
        return torch.tensor(values, dtype=dtype, device=device)
    return move(torch.tensor(values, dtype=dtype), device)


@lru_cache(maxsize=256)
def counts(values: tuple[int, ...], device: torch.device) -> Tensor:
    """A number for each row as a tensor [B] on a device, which is kept, since few occur and again and again. Nobody may
    change it."""
    return upload(values, device)


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device. The host does not wait for CUDA: the copy is from pinned memory, which PyTorch
    does not use again before the device has read it."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class Arriving:
    """A tensor on its way to the host, which waits for it only when it reads it. The copy is made when the device gets
    there, into pinned memory, so the tensor may be overwritten by what the device does later."""

    def __init__(self, tensor: Tensor):
        self._here, self._event = tensor.to("cpu", non_blocking=True, copy=True), None
        if tensor.device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))

    def tolist(self) -> list[Any]:
        """Its numbers, when they have arrived."""
        if self._event is not None:
            self._event.synchronize()
        return self._here.tolist()
