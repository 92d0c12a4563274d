"""The provenance of a run: code, versions and machine that its numbers depend on."""

import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers


def provenance(device: torch.device) -> dict[str, Any]:
    """The field `provenance` of results.json, for a run on this device."""
    sha, dirty = _git()
    on_cuda = device.type == "cuda"
    return {
        "git_sha": sha,
        "dirty": dirty,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "numpy": numpy.__version__,
        },
        "device": torch.cuda.get_device_name(device) if on_cuda else _cpu_name(),
        "threads": torch.get_num_threads(),
        "argv": sys.argv,
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _git() -> tuple[str | None, bool | None]:
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
