"""Runs nine commands that reach most of the code, and compares two such folders: texts, rounds, alpha and counts.

python experiments/same_results.py run FOLDER
python experiments/same_results.py compare BEFORE AFTER

A change that must move no token: run the commands at both commits, into two folders, and compare these. Times,
intervals and the verdict are left out. Finished runs of a folder are not repeated. The exit code is 1 if anything
differs, or if a run of BEFORE is not in AFTER. Folders of before November 2026 (`output` in prompts.jsonl) can be read
too.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

COMMON = ("executor=eager", "logger=none", "data.limit=8", "verdict_tokens=4000", "gamma=4")
NINE = {
    "greedy": ("temperature=0",),
    "sampled": ("temperature=1",),
    "bigram": ("temperature=1", "drafter=bigram"),
    "tree": ("temperature=1", "drafter=tree", "drafter.branching=[3,2]", "verifier=iterative"),
    "ende": ("temperature=1", "drafter=ende"),
    "beams": ("drafter=ende", "decoding=beam", "max_new_tokens=24"),
    "paged": ("temperature=1", "batch_size=8", "cache=paged"),
    "lenience": ("temperature=1", "lenience=0.5"),
    "hierarchical": ("temperature=1", "drafter=hierarchical"),
}
COUNTS = ("prompts", "rounds", "tokens", "drafted", "tested", "accepted", "recovered", "bonus", "failed")


def run(folder: Path) -> int:
    """Runs the nine commands with one thread each; returns how many failed."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    failed = 0
    for name, words in NINE.items():
        place = folder / name
        if (place / "results.json").is_file():
            continue
        place.mkdir(parents=True, exist_ok=True)
        call = [sys.executable, "-m", "specbench", *COMMON, f"hydra.run.dir={place}", *words]
        with (place / "terminal.txt").open("w") as output:
            done = subprocess.run(call, stdout=output, stderr=subprocess.STDOUT, env=environment, check=False)
        print(f"{name}: {'finished' if done.returncode == 0 else f'exit code {done.returncode}'}", flush=True)
        failed += done.returncode != 0
    return failed


def facts(folder: Path) -> dict[str, Any]:
    """What must not depend on time, of one finished run."""
    result = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    found = {f"counts of {name}": result["counts"][name] for name in COUNTS}
    for name in ("alpha", "alpha_counted", "alpha_on_target_text", "block_efficiency"):
        found[name] = result[name] and result[name]["mean"]
    found["draft_acceptance_rate"] = result["draft_acceptance_rate"]
    places = result["beta_by_position"] if "beta_by_position" in result else result["acceptance"]["by_place"]
    found |= {f"beta at place {place}": each["mean"] for place, each in enumerate(places, 1)}
    for text in (folder / "prompts.jsonl").read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        names = ("text", "plain text", "rounds")
        found |= {f"{name} of {line['id']}": value for name, value in zip(names, texts(line), strict=True)}
    return found


def texts(line: dict[str, Any]) -> tuple[str | None, str | None, int | None]:
    """Both texts of a request and the number of its rounds; None if it failed."""
    if "output" in line:
        return line["output"], line["baseline_output"], line["rounds"]
    ours, plain = line["speculative"], line["baseline"]
    if ours is None or plain is None:
        return None, None, None
    return ours["text"], plain["text"], len(ours["rounds"]["tokens"])


def same(fact: str, one: Any, other: Any) -> bool:
    """Whether two facts are equal. Means of beta may differ as rounding of float32 products does: another product, or
    another order of its sums, moves no token but the last digits of p and q."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-5 if fact == "alpha_on_target_text" else 1e-6)
    return bool(one == other)


def compare(before: Path, after: Path) -> int:
    """Prints what differs; returns the exit code."""
    names = sorted(path.parent.relative_to(before) for path in before.rglob("results.json"))
    differences = 0
    for name in names:
        if not (after / name / "results.json").is_file():
            differences += 1
            print(f"{name}: not in {after}")
            continue
        old, new = facts(before / name), facts(after / name)
        for fact in dict.fromkeys([*old, *new]):
            if not same(fact, old.get(fact), new.get(fact)):
                differences += 1
                print(f"{name}: {fact} was {str(old.get(fact))[:60]!r} and is {str(new.get(fact))[:60]!r}")
    print(f"{len(names)} runs compared, {differences} differences")
    return int(differences > 0 or not names)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["run", place]:
            sys.exit(run(Path(place)) > 0)
        case ["compare", old, new]:
            sys.exit(compare(Path(old), Path(new)))
        case _:
            sys.exit(__doc__)
