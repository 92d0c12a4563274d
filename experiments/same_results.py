"""Compares the runs in two folders job by job: texts, counts, alpha, block efficiency and verdict, to the last digit.

python experiments/same_results.py BEFORE AFTER

Times are left out. The exit code is 1 if anything differs, or if a run of BEFORE is not in AFTER. Use it before and
after a change that must move no token: run the same commands at both commits, into two folders.
"""

import json
import sys
from pathlib import Path
from typing import Any

from specbench.results.reader import StoredRun

NUMBERS = ("alpha", "alpha_counted", "alpha_on_target_text", "alpha_by_category", "beta_by_position", "counts",
           "block_efficiency", "draft_acceptance_rate", "operations_factor", "drift")  # fmt: skip
OF_PROMPTS = ("id", "prompt", "output", "baseline_output", "rounds", "alpha", "block_efficiency")


def facts(folder: Path) -> dict[str, Any]:
    """What must not depend on time, of one finished run."""
    run = StoredRun(folder, json.loads((folder / "results.json").read_text(encoding="utf-8")))
    found = {name: run.result[name] for name in NUMBERS}
    found["lossless"] = [run.result["lossless"].get(name) for name in ("verdict", "passed", "statistic")]
    found["prompts"] = [{name: line.get(name) for name in OF_PROMPTS} for line in run.prompts]
    return found


def main(before: Path, after: Path) -> int:
    """Prints what differs; returns the exit code."""
    runs = sorted(path.parent.relative_to(before) for path in before.rglob("results.json"))
    differences = 0
    for run in runs:
        if not (after / run / "results.json").is_file():
            differences += 1
            print(f"{run}: not in {after}")
            continue
        old, new = facts(before / run), facts(after / run)
        for name in old:
            if old[name] != new[name]:
                differences += 1
                print(f"{run}: {name} differs")
    print(f"{len(runs)} runs compared, {differences} differences")
    return int(differences > 0 or not runs)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python experiments/same_results.py BEFORE AFTER")
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
