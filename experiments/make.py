"""Makes the stored tables again that two cores make within about an hour: measures everything, then writes the tables.

    python experiments/make.py --list       # what, and for how many minutes
    python experiments/make.py              # all of it
    python experiments/make.py drafters     # some of it

Commit first: the tables name the commit. Let nothing else run. The same command goes on where it was stopped, since
each measurement does; remove outputs/NAME to measure NAME again.
"""

import argparse
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Step:
    """A folder of experiments/, the words after `python -m` that measure it (none: its make.py does), and minutes on
    two cores of an Intel Xeon (family 6, model 106)."""

    folder: str
    measure: str
    minutes: int


STEPS = [
    Step("default", "specbench -m name=default repeats=5 repeats_vary=seed temperature=0,1 logger=none", 10),
    Step("drafters", "specbench.compare experiment=drafters data.limit=16", 10),
    Step("verifiers", "specbench.compare experiment=verifiers data.limit=32", 3),
    Step("lenience", "specbench.compare experiment=lenience", 4),
    Step("vs_transformers", "specbench experiment=vs_transformers executor=prepacked data.limit=16", 3),
    Step("verdict_power", "", 3),
    Step("coverage", "", 1),
]


def commands(steps: list[Step]) -> list[tuple[str, list[str]]]:
    """What to run, in turn: measurements before makers, which write into the checkout."""
    measured = [step for step in steps if step.measure]
    found = [(f"measure {step.folder}", ["-m", *shlex.split(step.measure)]) for step in measured]
    for step in steps:
        inputs = [f"outputs/{step.folder}"] if step.measure else []
        found.append((f"make {step.folder}", [f"experiments/{step.folder}/make.py", *inputs]))
    return found


def main() -> int:
    """Returns 1 if a command failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(step.folder for step in STEPS)}")
    parser.add_argument("--list", action="store_true", help="print what would run, and how long")
    args = parser.parse_args()
    if unknown := set(args.names) - {step.folder for step in STEPS}:
        parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(step.folder for step in STEPS)}")
    steps = [step for step in STEPS if step.folder in args.names or not args.names]
    if args.list:
        for step in steps:
            print(f"{step.folder:16} {step.minutes:3} min  {step.measure or f'experiments/{step.folder}/make.py'}")
        print(f"{'all':16} {sum(step.minutes for step in steps):3} min")
        return 0
    if subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, check=True).stdout:
        print("The checkout has changes: the tables will say so.")
    todo, failed = commands(steps), []
    for number, (what, words) in enumerate(todo, 1):
        print(f"{number} of {len(todo)}: {what}", flush=True)
        began = time.perf_counter()
        if subprocess.run([sys.executable, *words], cwd=ROOT).returncode:
            failed.append(what)
        print(f"{number} of {len(todo)}: {time.perf_counter() - began:.0f} s", flush=True)
    if failed:
        print(f"Failed: {', '.join(failed)}. The same command tries again.")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
