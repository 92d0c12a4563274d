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


def cache_file(kind: str, machine: str) -> Path:
    """The file of one kind of measurement on the machine of this description."""
    return cache_dir() / f"{kind}-{hashlib.sha256(machine.encode()).hexdigest()[:12]}.json"


def read_json(path: Path | None) -> Any:
    """The content of a file; an empty dict if there is none, or it is damaged."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads(path.read_text()) if path is not None else {}
    return {}


def write_json(path: Path, content: Any) -> bool:
    """Replaces a file in one step. Returns whether it could be written."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with contextlib.suppress(OSError):  # a cache that cannot be written costs time only
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(content, indent=1))
        os.replace(temporary, path)
        return True
    return False


def machine_name(device: torch.device) -> str:
    """Processor or GPU, instructions, threads and the version of torch."""
    return f"{device_name(device)}, {cpu_features()}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def cpu_features() -> str:
    """What compiled code and products depend on of a processor, besides its name: torch's vector width, and a hash of
    the instructions that the system lists."""
    flags = _cpu_line("flags", "Features") or platform.machine()
    return f"{torch.backends.cpu.get_cpu_capability()}, {hashlib.sha256(flags.encode()).hexdigest()[:8]}"


def device_name(device: torch.device) -> str:
    """The name of the GPU, or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return (_cpu_line("model name") or platform.processor() or platform.machine()).strip()


def _cpu_line(*names: str) -> str | None:
    """The value of the first of these entries that /proc/cpuinfo has."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1] for line in lines if line.startswith(names))
    return None


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated: of the GPU, or of the machine and its control group."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = [_available()]
    limit, used = (_number(Path("/sys/fs/cgroup") / name) for name in ("memory.max", "memory.current"))
    if limit is not None and used is not None:
        free.append(limit - used)
    return min(free)


def _available() -> int:
    """Bytes of the machine's memory that programs can still have; very many where the system does not say."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    return 2**62


def _number(path: Path) -> int | None:
    """The number in a file; None if there is none, as where a control group has no limit."""
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text())
    return None
