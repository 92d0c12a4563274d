"""Facts about this machine: its processor or GPU, free memory, and the folder for what can be made again."""

import contextlib
import hashlib
import os
import platform
from pathlib import Path

import torch


def cache_dir() -> Path:
    """Where what can be made again is kept between runs: $SPECBENCH_CACHE, or specbench/ in the user's cache folder."""
    own, users = os.environ.get("SPECBENCH_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return Path(own).expanduser() if own else Path(users or "~/.cache").expanduser() / "specbench"


def cpu_features() -> str:
    """What compiled code and products depend on of a processor, besides its name: torch's vector width, and a hash of
    the instructions that the system lists."""
    flags = _system_line("/proc/cpuinfo", "flags", "Features") or platform.machine()
    return f"{torch.backends.cpu.get_cpu_capability()}, {hashlib.sha256(flags.encode()).hexdigest()[:8]}"


def device_name(device: torch.device) -> str:
    """The name of the GPU, or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return (_system_line("/proc/cpuinfo", "model name") or platform.processor() or platform.machine()).strip()


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, of a device or of this machine."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated: of the GPU, or of the machine and its control group. Very many where the
    system does not say."""
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
