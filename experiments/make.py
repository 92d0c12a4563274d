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
    """A folder of experiments/, the words after `python -m` of what measures it into outputs/NAME, by NAME (none: its
    make.py does), and minutes on two cores of an Intel Xeon (family 6, model 106)."""

    folder: str
    minutes: int
    measure: dict[str, str]


def by_temperature(name: str, words: str) -> dict[str, str]:
    """A comparison at temperature 0, and one at 1."""
    return {f"{name}_t{t}": f"specbench.compare {words} name={name}_t{t} temperature={t}" for t in (0, 1)}


DEFAULT = "specbench -m name=default repeats=20 repeats_vary=seed temperature=1 verdict_tokens=0 logger=none"
SMOLLM2 = "specbench.compare experiment=smollm2 data=spec_bench data.path=question.jsonl name=drafters_smollm2"
DRAFTERS = by_temperature("drafters", "experiment=drafters data.limit=16") | {"drafters_smollm2": SMOLLM2}
STEPS = [
    Step("default", 12, {"default": DEFAULT}),
    Step("drafters_2026", 20, DRAFTERS),
    Step("verifiers", 3, {"verifiers": "specbench.compare experiment=verifiers data.limit=32"}),
    Step("lenience", 3, {"lenience": "specbench.compare experiment=lenience name=lenience temperature=1"}),
    Step("paper", 20, {"paper": "specbench experiment=paper logger=none"}),
    Step("verdict_power", 3, {}),
    Step("coverage", 1, {}),
]


def commands(steps: list[Step]) -> list[tuple[str, list[str]]]:
    """What to run, in turn: measurements before makers, which write into the checkout."""
    measured = [(f"measure {name}", ["-m", *shlex.split(words)]) for s in steps for name, words in s.measure.items()]
    makers = [[f"experiments/{s.folder}/make.py", *(f"outputs/{name}" for name in s.measure)] for s in steps]
    return measured + [(f"make {s.folder}", words) for s, words in zip(steps, makers, strict=True)]


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
            print(f"{step.folder:16} {step.minutes:3} min  {' && '.join(step.measure.values())}")
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
