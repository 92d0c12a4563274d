"""What compiled code and measured times depend on of this machine, and the files in which they are kept."""

import contextlib
import hashlib
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch


def cache_dir() -> Path:
    """Where what can be made again is kept between runs: $SPECBENCH_CACHE, or specbench/ in the user's cache folder."""
    own, users = os.environ.get("SPECBENCH_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return Path(own).expanduser() if own else Path(users or "~/.cache").expanduser() / "specbench"


def only_own(path: Path) -> bool:
    """Whether it is the user's and nobody else can write there: other code is not run. Raises OSError."""
    about = path.stat()
    return about.st_uid == os.getuid() and not about.st_mode & 0o022


def cache_file(kind: str, machine: str) -> Path:
    """The file of one kind of measurement on the machine of this description."""
    return cache_dir() / f"{kind}-{hashlib.sha256(machine.encode()).hexdigest()[:12]}.json"


def write_cache_file(path: Path | None, content: Any) -> None:
    """Replaces a file, if it is one, in one step. A cache that cannot be written costs time only."""
    if path is None:
        return
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(content, indent=1))
        os.replace(temporary, path)


def machine_name(device: torch.device) -> str:
    """Processor or GPU, instructions, threads and the version of torch."""
    return f"{device_name(device)}, {cpu_features()}, {torch.get_num_threads()} threads, torch {torch.__version__}"


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


def cpu_family() -> str:
    """Family and model of an x86 processor, whose name alone may belong to several; empty for others."""
    family, model = _system_line("/proc/cpuinfo", "cpu family"), _system_line("/proc/cpuinfo", "model\t")
    return f"family {family.strip()}, model {model.strip()}" if family and model else ""


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
