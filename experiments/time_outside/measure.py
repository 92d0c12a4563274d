"""How long a run takes beside decoding, by phase: a few runs, each in a process of its own.

python experiments/time_outside/measure.py
python experiments/time_outside/measure.py --times 1 temperature=0

Prints a table of wall-clock seconds. Results of versions without the field `seconds` give the totals alone.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean

DECODING = ("plain", "speculative", "peers")
MEASURING = ("probes", "betas", "verdict")
ENDS = "in no phase: files, page, the end of the process"


def seconds_of_run(folder: Path, overrides: list[str]) -> dict[str, float]:
    """Seconds by phase of one run, and its CPU seconds as `cpu`."""
    before, begun = os.times(), time.perf_counter()
    words = [sys.executable, "-m", "specbench", *overrides, f"hydra.run.dir={folder}"]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    whole, after = time.perf_counter() - begun, os.times()
    found: dict[str, float] = json.loads((folder / "results.json").read_text()).get("seconds", {})
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return {**found, ENDS: whole - sum(found.values()), "cpu": cpu}


def table(runs: list[dict[str, float]]) -> str:
    """Means over runs, in Markdown."""
    names = dict.fromkeys(name for run in runs for name in run)
    means = {name: mean(run.get(name, 0.0) for run in runs) for name in names}
    cpu = means.pop("cpu")
    decoding, measuring = (sum(means.get(name, 0.0) for name in group) for group in (DECODING, MEASURING))
    rows = {name.replace("_", " "): f"{value:.1f}" for name, value in means.items()}
    rows["**whole process**"] = f"{sum(means.values()):.1f} ({cpu:.1f} of CPU)"
    rows["**decoding**"] = f"{decoding:.1f}"
    rows["**probes, betas and verdict**"] = f"{measuring:.1f}"
    if decoding:
        rows["**probes, betas and verdict**"] += f", {measuring / decoding:.0%} of decoding"
    rows["**start and end**"] = f"{sum(means.values()) - decoding - measuring:.1f}"
    return "\n".join(["| phase | seconds |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def processor() -> str:
    """The model of the processor, as /proc/cpuinfo has it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def main() -> None:
    """Runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=3, help="how many runs")
    parser.add_argument("overrides", nargs="*", help="of python -m specbench")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = [seconds_of_run(Path(folder) / str(number), args.overrides) for number in range(args.times)]
    print(f"{args.times} x python -m specbench {' '.join(args.overrides)}; {processor()}, {os.cpu_count()} cores\n")
    print(table(runs))


if __name__ == "__main__":
    main()
