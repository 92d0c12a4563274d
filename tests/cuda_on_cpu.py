"""A CUDA device whose operations run on the CPU, so that whole decodes run on it and every wait of the host is seen.

    with cuda_on_cpu() as device:
        x = torch.arange(4, device="cuda") * 2
        x.tolist()
    device.waits == [Wait("tests.test_x.test", "tolist")]

Tensors have values, so the decoder goes on as it would on a GPU. What a GPU would refuse, or silently make slow, is
refused or noted:

- tensors of both devices in one operation raise `MixedDevicesError` (numbers on the CPU are allowed, as on a GPU);
- operations whose result's shape depends on values raise `DataDependentShapeError`: a GPU waits there, and no graph
  holds them;
- NumPy gets no tensor of the device;
- a value, or a copy, that the host waits for is noted in `device.waits`. Copies from pinned memory with `non_blocking`
  are not waited for.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from without_guard import WithoutGuard

from specbench.decoding.transfers import _kept, counts
from specbench.models import load

aten = torch.ops.aten
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
ROOT = Path(__file__).parent.parent
COPIES = (aten._to_copy.default, aten.copy_.default)


class MixedDevicesError(RuntimeError):
    """An operation got tensors of both devices."""


class DataDependentShapeError(RuntimeError):
    """An operation's result has a shape that depends on values."""


class Wait(NamedTuple):
    """A wait of the host for the device."""

    place: str  # the innermost function of specbench or its tests, with its module
    what: str  # the operation


class OnCuda(Tensor):
    """A tensor that says it is on CUDA; `inner` holds its values, on the CPU, with the same strides."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "OnCuda":
        self = Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=CUDA,
        )  # fmt: skip
        self.inner = inner
        return self

    def __repr__(self) -> str:
        return f"OnCuda({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} on a tensor of cuda_on_cpu outside of its context")


class Device(TorchDispatchMode):
    """The device: runs each operation on the CPU, and checks and notes what a GPU would not just run."""

    # PyTorch starts CUDA when a tensor is to be made there, unless a mode of this kind is on.
    _mode_key = torch._C._TorchDispatchModeKey.FAKE

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[Wait] = []
        self.pinned: dict[int, Tensor] = {}  # by address; kept, so that no other tensor gets the address

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    def wait(self, what: str) -> None:
        """Notes a wait of the host."""
        self.waits.append(Wait(place(), what))

    def pin(self, tensor: Tensor) -> Tensor:
        """The same tensor on the CPU, in what counts as pinned memory from now on."""
        self.pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether the tensor is a part of pinned memory."""
        return not isinstance(tensor, OnCuda) and tensor.untyped_storage().data_ptr() in self.pinned

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        wanted = kwargs.get("device")
        tensors = tensors_in((args, kwargs))
        ours = {id(x.inner): x for x in tensors if isinstance(x, OnCuda)}
        on_cuda = bool(ours) if wanted is None else torch.device(wanted).type == "cuda"
        if not ours and not on_cuda:
            return func(*args, **kwargs)
        if func in COPIES:
            self._copy(func, tensors, on_cuda, kwargs)
        else:
            self.check(func, tensors)
            self._values(func, args)
        if wanted is not None:
            kwargs["device"] = CPU
        result = func(*inner(args), **inner(kwargs))
        return outer(result, ours) if on_cuda else result

    def _copy(self, func: Any, tensors: list[Tensor], to_cuda: bool, kwargs: Any) -> None:
        """Notes a copy between the devices that the host waits for."""
        source = tensors[0]
        if func is aten.copy_.default:
            to_cuda, source = isinstance(tensors[0], OnCuda), tensors[1]
        if not source.numel():
            return
        if isinstance(source, OnCuda) == to_cuda or (func is aten.copy_.default and not source.dim() and to_cuda):
            return  # a number becomes an argument of the kernel
        if not (to_cuda and self.is_pinned(source) and kwargs.get("non_blocking")):
            self.wait("copy to the device" if to_cuda else "copy to the host")

    def check(self, func: Any, tensors: list[Tensor]) -> None:
        """Raises MixedDevicesError if an operation cannot take these tensors."""
        numbers = torch.Tag.pointwise in getattr(func, "tags", ())  # such kernels take numbers from the host
        theirs = [x for x in tensors if not isinstance(x, OnCuda) and (x.dim() or not numbers)]
        if theirs and len(theirs) < len(tensors):
            shapes = ", ".join(f"{x.device.type}{list(x.shape)}" for x in tensors)
            raise MixedDevicesError(f"{func} got tensors of both devices in {place()}: {shapes}")

    def _values(self, func: Any, args: Any) -> None:
        """Raises DataDependentShapeError; notes an operation whose result the host waits for."""
        name = func.overloadpacket.__name__
        if "index" in name:
            dynamic = any(x.dtype in (torch.bool, torch.uint8) for x in tensors_in(args[1]))
        else:
            dynamic = torch.Tag.dynamic_output_shape in func.tags
        if dynamic:
            raise DataDependentShapeError(f"the shape of {func} depends on values, in {place()}")
        if torch.Tag.data_dependent_output in func.tags:
            self.wait(name.lstrip("_"))


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, tuple | list):
        return []
    return [x for entry in value for x in tensors_in(entry)]


def inner(value: Any) -> Any:
    """The same tuples, lists and dicts with the tensors that the operations run on."""
    if isinstance(value, OnCuda):
        return value.inner
    if isinstance(value, dict):
        return {key: inner(entry) for key, entry in value.items()}
    return type(value)(map(inner, value)) if type(value) in (tuple, list) else value


def outer(result: Any, known: dict[int, OnCuda]) -> Any:
    """A result whose tensors are on CUDA: those that are `known` by the identity of their inner tensor, or new ones."""
    if isinstance(result, Tensor):
        return known[id(result)] if id(result) in known else OnCuda(result)
    return type(result)([outer(entry, known) for entry in result]) if isinstance(result, tuple | list) else result


def place() -> str:
    """The innermost function of specbench that is running, as module and name; of the tests, if there is none."""
    frame, test = sys._getframe(1), ""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and path != Path(__file__) and path.name != "without_guard.py":
            found = ".".join(path.relative_to(ROOT).with_suffix("").parts) + "." + frame.f_code.co_qualname
            if found.startswith("specbench."):
                return found.removeprefix("specbench.")
            test = test or found
        frame = frame.f_back
    return test


class OnHost(WithoutGuard):
    """What Python asks of tensors: addresses, pinned memory, and attention, which would be a kernel of CUDA."""

    def __init__(self, device: Device):
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.data_ptr and isinstance(args[0], OnCuda):
            return args[0].inner.data_ptr()
        if func is Tensor.tolist and isinstance(args[0], OnCuda):
            self.device.wait("tolist")
            return args[0].inner.tolist()
        if func is torch.nn.functional.scaled_dot_product_attention and isinstance(args[0], OnCuda):
            self.device.check(func, tensors_in((args, kwargs)))
            return OnCuda(func(*inner(args), **inner(kwargs)))
        if func in (Tensor.numpy, Tensor.__array__) and isinstance(args[0], OnCuda):
            raise TypeError("NumPy takes no tensor of a device")
        if func is Tensor.pin_memory:
            return self.device.pin(args[0].clone())
        if func is Tensor.is_pinned:
            return self.device.is_pinned(args[0])
        return super().__torch_function__(func, types, args, kwargs)


@contextmanager
def cuda_on_cpu() -> Iterator[Device]:
    """Inside this context device "cuda" exists; yields it."""
    device = Device()
    before = torch._C._only_lift_cpu_tensors()
    with ExitStack() as stack:
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") makes a CPU tensor, and copies it
        stack.callback(torch._C._set_only_lift_cpu_tensors, before)
        stack.enter_context(mock.patch.object(torch.cuda, "Event", Event))
        stack.enter_context(mock.patch.object(torch.cuda, "current_stream", lambda *_: None))
        stack.enter_context(mock.patch.object(torch.cuda, "synchronize", lambda *_: device.wait("synchronize")))
        stack.enter_context(torch.inference_mode(False))  # there, operations would arrive before they are taken apart
        stack.enter_context(torch.no_grad())
        for kept in (_kept, counts):  # tensors of this device
            stack.callback(kept.cache_clear)
        stack.enter_context(device)
        stack.enter_context(OnHost(device))
        yield device


def answer_for_a_machine(patch: Any) -> None:
    """Checkpoints are loaded onto the device of `cuda_on_cpu`, which the machine has, with 100 GB of memory."""
    read = load.load_module

    def loaded(settings: Any, role: Any, device: Any, dtype: Any, seed: int) -> Any:
        return to_cuda(read(settings, role, CPU, dtype, seed))

    patch.setattr(load, "load_module", loaded)
    patch.setattr(load, "reads_trees", lambda model, key: True)  # which compares numbers
    answers = {"is_available": True, "device_count": 1, "set_device": None, "get_device_name": "fake",
               "mem_get_info": (10**11, 10**11), "reset_peak_memory_stats": None, "max_memory_allocated": 1,
               "empty_cache": None}  # fmt: skip
    for name, value in answers.items():
        patch.setattr(torch.cuda, name, lambda *given, value=value: value)
    patch.setattr(torch, "inference_mode", lambda *mode: torch.no_grad())  # see `cuda_on_cpu`


def to_cuda(module: nn.Module) -> nn.Module:
    """Moves a module to "cuda" in place, inside of `cuda_on_cpu`: its parameters and buffers stay tied."""
    moved: dict[int, Tensor] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                new = moved.setdefault(id(parameter), nn.Parameter(OnCuda(parameter.data), requires_grad=False))
                part._parameters[name] = new
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else moved.setdefault(id(buffer), OnCuda(buffer))
    return module


class Event:
    """Stands in for `torch.cuda.Event`, as far as the clock needs it."""

    def __init__(self, enable_timing: bool = False, external: bool = False):
        self.at = 0.0

    def record(self, stream: Any = None) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds from this event to `end`."""
        return 1e3 * (end.at - self.at)
