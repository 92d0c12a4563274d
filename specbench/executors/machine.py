"""This machine: its processor or GPU, the device and dtype that a run has there, free memory, and the cache folder."""

import contextlib
import hashlib
import os
import platform
from pathlib import Path
from typing import Any

import torch

from specbench.errors import ConfigError


def cache_dir() -> Path:
    """Where what can be made again is kept between runs: $SPECBENCH_CACHE, or specbench/ in the user's cache folder."""
    own, users = os.environ.get("SPECBENCH_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return Path(own).expanduser() if own else Path(users or "~/.cache").expanduser() / "specbench"


def cpu_features() -> str:
    """What compiled code depends on of a processor: torch's vector width, and a hash of its list of instructions."""
    flags = _system_line("/proc/cpuinfo", "flags", "Features") or platform.machine()
    return f"{torch.backends.cpu.get_cpu_capability()}, {hashlib.sha256(flags.encode()).hexdigest()[:8]}"


def pick_device(name: str) -> torch.device:
    """The device that the setting names: auto, cpu, cuda or cuda:N. A CUDA device becomes the current one, on which
    streams, events and graphs are made. Raises ConfigError if there is no such device."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device={name} is not here: {torch.cuda.device_count()} CUDA devices are visible, use cpu")
    torch.cuda.set_device(device.index or 0)
    products: Any = torch.backends.cuda.matmul  # split sums of products stay in float32
    products.allow_bf16_reduced_precision_reduction = products.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew, for 20 to 40 ms, at every new length of a text
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype that the setting names; `auto` is float32 on a CPU, where 16 bits gain nothing, bfloat16 on CUDA."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def device_name(device: torch.device) -> str:
    """The name of the GPU, or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return (_system_line("/proc/cpuinfo", "model name") or platform.processor() or platform.machine()).strip()


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, of a device or of this machine."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def free_bytes(device: torch.device) -> int:
    """Bytes still free on the GPU, or the machine and its control group; very many where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    available = _system_line("/proc/meminfo", "MemAvailable")
    free = 2**62 if available is None else int(available.split()[0]) * 1024
    with contextlib.suppress(OSError, ValueError):  # no control group, or one without a limit
        limit, used = (int(Path("/sys/fs/cgroup", name).read_text()) for name in ("memory.max", "memory.current"))
        free = min(free, limit - used)
    return free


def _system_line(path: str, *names: str) -> str | None:
    """The value of the first of these entries that a file of the system has."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(path).read_text().splitlines()
        return next(line.split(":", 1)[1] for line in lines if line.startswith(names))
    return None
