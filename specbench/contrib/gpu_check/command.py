"""`python -m specbench.gpu_check`: twelve checks of the CUDA path, in ten minutes. It needs no network."""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from specbench.config.devices import pick_device
from specbench.contrib.gpu_check.check import PASSED, Outcome, Phase
from specbench.contrib.gpu_check.fixtures import Lab
from specbench.contrib.gpu_check.page import as_json, shown, write
from specbench.contrib.gpu_check.phases import PHASES
from specbench.contrib.gpu_check.runner import Command, lines_of, measure_into, own_command, run_phases, write_facts
from specbench.contrib.gpu_check.timer import CudaTimer
from specbench.errors import ConfigError, stop

NO_CUDA = "no CUDA device is here: these checks measure one, and a CPU needs none of them (device=cpu)"


def main(argv: Sequence[str] | None = None) -> None:
    """Exits with 0 if every check has passed, 1 if one has not, and 2 if there is nothing to check."""
    options = parsed(sys.argv[1:] if argv is None else argv)
    if not torch.cuda.is_available():
        stop(NO_CUDA, 2)
    try:
        device = pick_device(options.device)
    except ConfigError as error:
        stop(str(error), 2)
    folder = Path(options.out)
    if options.child is not None:
        child(options.child, device, folder, options.compile)
        return
    wanted = [PHASES[number] for number in options.phase or PHASES]
    sys.exit(check_all(wanted, folder, options.limit_seconds, own_command(options.device, folder, options.compile)))


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    """The command line. Ends the process with exit code 2 if it is not understood."""
    parser = argparse.ArgumentParser(prog="python -m specbench.gpu_check", description=__doc__)
    parser.add_argument("--phase", type=int, choices=PHASES, action="append", help="only this one; may be repeated")
    parser.add_argument("--out", default="outputs/gpu_check", help="folder for results.json, report.html and logs")
    parser.add_argument("--limit-seconds", type=float, default=600, help="for all of them together")
    parser.add_argument("--device", default="cuda", help="cuda or cuda:N")
    parser.add_argument("--compile", action="store_true", help="graphs of compiled programs; makes them, for minutes")
    parser.add_argument("--child", type=int, choices=PHASES, help=argparse.SUPPRESS)  # one phase, in this process
    return parser.parse_args(argv)


def child(number: int, device: torch.device, folder: Path, compiled: bool) -> None:
    """Runs one phase in this process."""
    write_facts(device, folder)
    lab = Lab(device, folder / f"phase_{number}", compiled)
    measure_into(PHASES[number](), lab, CudaTimer(device), lines_of(folder, number))


def check_all(phases: Sequence[type[Phase]], folder: Path, limit: float, command: Command) -> int:
    """Runs the phases, prints and writes what they found; returns the exit code."""
    console, began = Console(), time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "facts.json").unlink(missing_ok=True)
    with console.status("") as status:

        def told(what: type[Phase] | Outcome) -> None:
            if isinstance(what, Outcome):
                console.print(shown(what))
            else:
                status.update(f"{what.number} of {max(PHASES)}: {what.title} ({time.monotonic() - began:.0f} s so far)")

        outcomes = run_phases(phases, folder, limit, command, told)
    facts = folder / "facts.json"
    known = json.loads(facts.read_text(encoding="utf-8")) if facts.is_file() else {}
    found = as_json(outcomes, known, shlex.join(["python", "-m", "specbench.gpu_check", *sys.argv[1:]]),
                    time.monotonic() - began)  # fmt: skip
    write(folder, found, outcomes, PHASES)
    counts = ", ".join(f"{count} {verdict}" for verdict, count in found["verdicts"].items())
    console.print(f"{counts}, in {found['seconds']:.0f} s; written to {folder / 'report.html'}")
    return int(any(outcome.verdict != PASSED for outcome in outcomes))
