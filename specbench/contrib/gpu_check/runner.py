"""Runs each phase in a process of its own, since an error of CUDA stays until its process ends.

The process appends what it finds to a file, line by line, so that nothing is lost if it is stopped.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import inference_mode

from specbench.contrib.gpu_check.check import Number, Outcome, Phase
from specbench.contrib.gpu_check.fixtures import Lab
from specbench.contrib.gpu_check.timer import Timer
from specbench.results.provenance import provenance

SHOWN = 600  # characters of the end of a log
Command = Callable[[int], Sequence[str]]  # the command of a phase's process


def measure_into(phase: Phase, lab: Lab, timer: Timer, path: Path) -> None:
    """Runs a phase here; appends each number to a file as it is found."""
    with path.open("a", encoding="utf-8") as file:
        numbers = phase.measure(phase.prepare(lab), timer)  # which may free what was prepared
        with inference_mode():
            for number in numbers:
                file.write(json.dumps(number.as_dict()) + "\n")
                file.flush()


def write_facts(device: torch.device, folder: Path) -> None:
    """The card, versions and commit, once for all phases."""
    if (folder / "facts.json").exists():
        return
    properties = torch.cuda.get_device_properties(device)
    card = {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
    }
    facts = provenance(device) | {"card": card, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    (folder / "facts.json").write_text(json.dumps(facts), encoding="utf-8")


def run_phases(
    phases: Sequence[type[Phase]], folder: Path, limit: float, command: Command, told: Callable[[Any], None]
) -> list[Outcome]:
    """Runs the phases one after the other, `limit` seconds in all: each may use its own share, and what earlier ones
    have left. `told` is called with each phase before it runs, and with its outcome after."""
    outcomes, end = [], time.monotonic() + limit
    scale = limit / max(sum(phase.seconds for phase in phases), 1)
    for place, phase in enumerate(phases):
        later = sum(other.seconds for other in phases[place + 1 :]) * min(1.0, scale)
        told(phase)
        outcome = run_phase(phase, folder, end - time.monotonic() - later, command(phase.number))
        outcomes.append(outcome)
        told(outcome)
    return outcomes


def run_phase(phase: type[Phase], folder: Path, allowed: float, command: Sequence[str]) -> Outcome:
    """Runs a phase's process for at most `allowed` seconds, and reads what it found."""
    log, lines = folder / f"phase_{phase.number}.log", lines_of(folder, phase.number)
    lines.unlink(missing_ok=True)
    began, out_of_time = time.monotonic(), False
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            process.wait(max(allowed, 0.0))
        except subprocess.TimeoutExpired:
            out_of_time = True
        finally:
            stop_all(process)
    error = f"not finished within {max(allowed, 0):.0f} s" if out_of_time else ""
    if process.returncode and not out_of_time:
        error = log.read_text(encoding="utf-8", errors="replace")[-SHOWN:].strip() or f"exit code {process.returncode}"
    seconds = time.monotonic() - began
    return Outcome(phase.number, phase.title, round(allowed, 1), round(seconds, 1), read(lines), error, out_of_time)


def stop_all(process: "subprocess.Popen[bytes]") -> None:
    """Ends the process and those that it started, if they still run."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def lines_of(folder: Path, number: int) -> Path:
    """The file that a phase's process appends to."""
    return folder / f"phase_{number}.jsonl"


def read(path: Path) -> list[Number]:
    """The numbers that a phase's process wrote; a last line that it did not finish is left out."""
    if not path.is_file():
        return []
    found = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [Number.from_dict(json.loads(line)) for line in found]


def own_command(device: str, folder: Path, compiled: bool = False) -> Command:
    """This command, for one phase."""
    start = [sys.executable, "-m", "specbench.gpu_check", "--device", device, "--out", str(folder)]
    start += ["--compile"] if compiled else []
    return lambda number: [*start, "--child", str(number)]
