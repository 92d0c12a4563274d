"""Methods of tensors on CUDA as the operations that they consist of, for builds of PyTorch without CUDA."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten
NUMBERS = {Tensor.__bool__: bool, Tensor.__int__: int, Tensor.__float__: float, Tensor.__index__: int}


class WithoutGuard(TorchFunctionMode):
    """Steps around the methods of tensors that need the guard of the CUDA device in C++, or pinned memory, which builds
    of PyTorch without CUDA lack: they become the operations that they consist of."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.pin_memory:
            return args[0]
        if func is Tensor.to and args[0].device.type == "cpu":
            return sent(func, *args, **kwargs)
        if args and isinstance(args[0], Tensor) and args[0].device.type == "cuda":
            if func is Tensor.__getitem__:
                return read_index(*args)
            if func is Tensor.__setitem__:
                return write_index(*args)
            if func in NUMBERS:
                return NUMBERS[func](aten._local_scalar_dense(args[0]))
            if func is Tensor.nonzero:
                return aten.nonzero(args[0])
            if func is Tensor.__invert__:
                return aten.bitwise_not(args[0])
            if func is Tensor.copy_:
                return aten.copy_(*args, **kwargs)
            if func is Tensor.contiguous and not args[0].is_contiguous(**kwargs):
                return args[0].clone(memory_format=kwargs.get("memory_format", torch.contiguous_format))
            if func is Tensor.contiguous:
                return args[0]
        return func(*args, **kwargs)


def sent(to: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """x.to(...) of a tensor on the CPU, which may send it to CUDA."""
    target = kwargs.get("device", args[0] if args and isinstance(args[0], str | torch.device) else None)
    if target is None or torch.device(target).type != "cuda":
        return to(x, *args, **kwargs)
    dtype = next((a for a in (*args, kwargs.get("dtype")) if isinstance(a, torch.dtype)), x.dtype)
    return aten._to_copy(x, dtype=dtype, device=torch.device(target), non_blocking=kwargs.get("non_blocking", False))


def read_index(x: Tensor, index: Any) -> Tensor:
    """x[index] as operations on views, and at most one `aten.index`."""
    view, indices = views(x, index)
    return aten.index(view, indices) if indices else view


def write_index(x: Tensor, index: Any, value: Any) -> None:
    """x[index] = value as operations on views, and one `aten.copy_`, `aten.fill_` or `aten.index_put_`."""
    view, indices = views(x, index)
    if not isinstance(value, Tensor):
        value = torch.full((), value, dtype=x.dtype, device=x.device)
    if indices:
        aten.index_put_(view, indices, value.to(x.dtype))
    else:
        aten.copy_(view, value)


def views(x: Tensor, index: Any) -> tuple[Tensor, list[Tensor | None]]:
    """The view that numbers, slices, Nones and Ellipsis of an index select, and its tensors by dimension."""
    entries = list(index) if isinstance(index, tuple) else [index]
    taken = sum(entry is not None and entry is not Ellipsis for entry in entries)
    if not any(entry is Ellipsis for entry in entries):
        entries.append(Ellipsis)
    indices: list[Tensor | None] = []
    dim = 0
    rest = x.dim() - taken  # dimensions that Ellipsis stands for; a boolean tensor would take more than one
    for entry in entries:
        if isinstance(entry, list):
            entry = torch.tensor(entry, dtype=None if entry else torch.long)
        if entry is None:
            x = aten.unsqueeze(x, dim)
        elif isinstance(entry, int):
            x = aten.select(x, dim, entry)
            continue
        elif isinstance(entry, slice):
            start, stop = entry.start or 0, sys.maxsize if entry.stop is None else entry.stop  # as compilers expect
            x = x if entry == slice(None) else aten.slice(x, dim, start, stop, entry.step or 1)
        elif isinstance(entry, Tensor):
            indices += [None] * (dim - len(indices)) + [entry]
        if entry is Ellipsis:
            dim += rest
        else:
            dim += entry.dim() if isinstance(entry, Tensor) and entry.dtype is torch.bool else 1
    return x, indices
