"""The provenance of a run: code, versions and machine that its numbers depend on."""

import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers

from specbench.executors.machine import cpu_family, device_name


def provenance(device: torch.device) -> dict[str, Any]:
    """The field `provenance` of results.json, for a run on this device."""
    sha, dirty = _git()
    return {
        "git_sha": sha,
        "dirty": dirty,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "numpy": numpy.__version__,
        },
        "device": device_name(device),
        "cpu_family": cpu_family(),
        "threads": torch.get_num_threads(),
        "argv": sys.argv,
    }


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
