"""`python -m specbench.gpu_check`: checks of the CUDA path, in ten minutes. It needs no network."""

import argparse
import json
import logging
import subprocess
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import inference_mode

from specbench.config.devices import pick_device
from specbench.contrib.gpu_check import agreement, decoding, timing
from specbench.contrib.gpu_check.bench import FAILED, INFO, PASSED, UNCLEAR, Bench, Measured
from specbench.errors import ConfigError, stop
from specbench.results.provenance import provenance

ORDER = (1, 2, 11, 3, 4, 5, 6, 7, 8, 9, 10)  # what says whether it is right comes first
NO_CUDA = "no CUDA device is here: these checks measure one, and a CPU needs none of them (device=cpu)"
COLOURS = {PASSED: "green", FAILED: "red", UNCLEAR: "yellow", INFO: "dim"}
LOG_END = 4000  # characters of the end of a log
ASKED = (["nvidia-smi"], [sys.executable, "-m", "torch.utils.collect_env"])  # about the machine


@dataclass(frozen=True)
class Check:
    """A check that runs in a process of its own; `seconds` is its share of ten minutes."""

    title: str
    seconds: int
    measure: Callable[[Bench], Iterator[Measured]]


CHECKS = dict(enumerate((
    Check("Triton kernels against PyTorch", 40, agreement.kernels_and_torch),
    Check("graphs against eager mode", 50, agreement.graphs_and_eager),
    Check("one-token step of the 3B shape", 30, timing.step),
    Check("tokens per second of the 3B and 1B shapes", 120, decoding.speeds),
    Check("the longest kernels of a round", 60, decoding.longest_kernels),
    Check("p in bfloat16", 40, decoding.laws),
    Check("waits, graphs and kernels of a round", 50, timing.one_round),
    Check("events against the host's clock", 30, timing.clocks),
    Check("products", 20, decoding.products),
    Check("the step in eager mode, and compiled", 100, timing.compiled_step),
    Check("whole runs and their verdicts", 60, agreement.whole_runs),
), 1))  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Exits with 0 if every check has passed, 1 if one has not, and 2 if there is nothing to check."""
    began, options = time.monotonic(), parsed(sys.argv[1:] if argv is None else argv)
    if not torch.cuda.is_available():
        stop(NO_CUDA, 2)
    try:
        device = pick_device(options.device)
    except ConfigError as error:
        stop(str(error), 2)
    if options.child is None:
        sys.exit(check_all(options, provenance(device) | {"cuda": torch.version.cuda} | machine(), began))
    logging.basicConfig(level=logging.INFO)  # for whole errors
    folder = Path(options.out)
    (own := folder / f"phase_{options.child}").mkdir(exist_ok=True)
    measure_into(CHECKS[options.child], Bench(device, own, options.compile), numbers_file(folder, options.child))


def machine() -> dict[str, str]:
    """What programs say of driver, clocks, limits, other processes and packages, by command."""
    found = {}
    for command in ASKED:
        with suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=30)
            found[" ".join(command[-2:])] = done.stdout
    return found


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    """The command line. Ends the process with exit code 2 if it is not understood."""
    parser = argparse.ArgumentParser(prog="python -m specbench.gpu_check", description=__doc__)
    parser.add_argument("--phase", type=int, choices=CHECKS, action="append", help="only this one; may be repeated")
    parser.add_argument("--out", default="outputs/gpu_check", help="folder for results.json and logs")
    parser.add_argument("--limit-seconds", type=float, default=600, help="for all of them together")
    parser.add_argument("--device", default="cuda", help="cuda or cuda:N")
    parser.add_argument("--compile", nargs="?", const="true", default="false", choices=("true", "layers", "false"),
                        help="graphs of compiled programs, made for minutes, or of layers, made in less")  # fmt: skip
    parser.add_argument("--child", type=int, choices=CHECKS, help=argparse.SUPPRESS)  # one check, in this process
    return parser.parse_args(argv)


def measure_into(check: Check, bench: Bench, path: Path) -> None:
    """Runs a check here; appends each number to a file as it is found, so that nothing is lost if it is stopped."""
    with path.open("a", encoding="utf-8") as file, inference_mode():
        for number in check.measure(bench):
            file.write(json.dumps(asdict(number) | {"verdict": number.verdict}) + "\n")
            file.flush()


def numbers_file(folder: Path, number: int) -> Path:
    """The file that a check's process appends to."""
    return folder / f"phase_{number}.jsonl"


def check_all(options: argparse.Namespace, facts: dict[str, Any], began: float) -> int:
    """Runs the checks one after the other; prints and writes what they found, after each; returns the exit code. Each
    may use its share of the time that is left; the clock was `began` when the command started."""
    folder, console = Path(options.out), Console()
    folder.mkdir(parents=True, exist_ok=True)
    numbers, found = options.phase or ORDER, list[dict[str, Any]]()
    for place, number in enumerate(numbers):
        left = options.limit_seconds - (time.monotonic() - began)
        share = CHECKS[number].seconds / sum(CHECKS[other].seconds for other in numbers[place:])
        allowed = max(0.0, left * share)
        found.append(run_check(number, folder, allowed, child_command(options, number)))
        console.print(as_table(found[-1]))
        verdicts = Counter(check["verdict"] for check in found)
        result = {"command": sys.argv, "seconds": time.monotonic() - began, "verdicts": verdicts, "facts": facts,
                  "checks": found}  # fmt: skip
        (folder / "results.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        everything = zip_of(folder)
    console.print(f"{dict(verdicts)}, in {result['seconds']:.0f} s; written to {folder / 'results.json'}")
    console.print(f"{everything} holds it with all logs, to send to whoever mends what failed")
    return int(set(verdicts) != {PASSED})


def zip_of(folder: Path) -> Path:
    """One file with the results, the numbers and the logs of a folder."""
    path = folder / "gpu_check.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for file in sorted((*folder.glob("*.json*"), *folder.glob("*.log"))):
            packed.write(file, file.name)
    return path


def child_command(options: argparse.Namespace, number: int) -> list[str]:
    """The command of one check's process."""
    start = [sys.executable, "-m", "specbench.gpu_check", "--device", options.device, "--out", options.out]
    return [*start, "--compile", options.compile, "--child", str(number)]


def run_check(number: int, folder: Path, allowed: float, command: Sequence[str]) -> dict[str, Any]:
    """Runs a check's process for at most `allowed` seconds, since an error of CUDA stays until its process ends, and
    reads what it found."""
    log, lines, began, error = folder / f"phase_{number}.log", numbers_file(folder, number), time.monotonic(), ""
    lines.unlink(missing_ok=True)
    try:
        with log.open("wb") as output:
            subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, timeout=allowed, check=True)
    except subprocess.TimeoutExpired:
        error = f"not finished within {allowed:.0f} s"
    except subprocess.CalledProcessError as failure:
        error = f"exit code {failure.returncode}: " + log.read_text(errors="replace")[-LOG_END:].strip()
    # A last line that was not finished is left out.
    text = lines.read_text(encoding="utf-8").split("\n")[:-1] if lines.is_file() else []
    numbers = [json.loads(line) for line in text]
    verdicts = {entry["verdict"] for entry in numbers}
    broke = error.startswith("exit")
    unclear = bool(error) or UNCLEAR in verdicts or not numbers
    verdict = FAILED if FAILED in verdicts or broke else UNCLEAR if unclear else PASSED
    return {"number": number, "title": CHECKS[number].title, "verdict": verdict, "error": error,
            "seconds": round(time.monotonic() - began, 1), "numbers": numbers}  # fmt: skip


def as_table(check: dict[str, Any]) -> Table:
    """A check and its numbers, for the terminal."""
    found = Table("", "value", "unit", "limit", "verdict", "remark", title_justify="left", box=None,
                  title=f"{check['number']}. {check['title']}: {check['verdict']} {check['error']}")  # fmt: skip
    for entry in check["numbers"]:
        value = "-" if entry["value"] is None else f"{entry['value']:,.4g}"
        limit = "" if entry["limit"] is None else "{} {:g}".format(*entry["limit"])
        found.add_row(entry["name"], value, entry["unit"], limit, entry["verdict"], entry["remark"],
                      style=COLOURS[entry["verdict"]])  # fmt: skip
    return found
