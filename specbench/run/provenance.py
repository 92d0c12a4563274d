"""Where a run was measured: code, versions, machine, and how fast its memory can be read."""

import gc
import platform
import resource
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers

from specbench.executors.machine import device_name, free_bytes

CPU_BYTES, CUDA_BYTES = 2**26, 2**30  # of the buffer whose reading is timed: more than a core's share of the caches
READS = 30


def provenance(device: torch.device) -> dict[str, Any]:
    """The field `provenance` of results.json, for a run on this device."""
    return code() | {
        "device": device_name(device),
        "cpu": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "argv": [program(Path(sys.argv[0])), *sys.argv[1:]],
    }


def code() -> dict[str, Any]:
    """The code that runs: its commit, whether that has changes, and versions."""
    sha, dirty = commit()
    packages = {package.__name__: package.__version__ for package in (torch, transformers, numpy)}
    return {"git_sha": sha, "dirty": dirty, "versions": {"python": platform.python_version()} | packages}


def program(path: Path) -> str:
    """The module that was called, as specbench.compare, or the name of another program; without its folder."""
    return f"specbench.{path.stem}" if (path.parent.name, path.suffix) == ("specbench", ".py") else path.name


def commit() -> tuple[str | None, bool | None]:
    """The commit of the checkout that specbench runs from, and whether it has changes; None outside a checkout."""
    folder = Path(__file__).resolve().parents[2]

    def git(*words: str) -> str:
        call = ["git", "-C", str(folder), *words]
        return subprocess.run(call, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) != folder:
            return None, None
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain"))
    except (OSError, subprocess.SubprocessError):
        return None, None


@cache  # runs of one process are compared
def bytes_per_second(device: torch.device) -> float:
    """How fast memory can be read: the fastest of many sums of a buffer larger than the caches, as others slow some."""
    cuda = device.type == "cuda"
    size = min(CUDA_BYTES, free_bytes(device) // 4) if cuda else CPU_BYTES
    buffer = torch.ones(size // 4, device=device)
    seconds = []
    for _ in range(READS):
        begin = time.perf_counter()
        buffer.sum()
        if cuda:
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return buffer.nbytes / min(seconds)


def forget_earlier_runs() -> None:
    """Frees models and graphs of earlier runs, which refer to each other, and GPU memory; `peak_bytes` begins anew."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_bytes(device: torch.device) -> int:
    """The most bytes of this process that were in use, on CUDA of the device's allocator."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
