"""The golden pack: thirteen small commands whose texts, rounds, alpha, counts and verdicts must stay what they were.

    python experiments/golden/golden.py           # runs all and compares them with golden.json
    python experiments/golden/golden.py --write   # stores what they give now

Each command is a process of its own with one thread and `executor=eager`. What is compared are hashes of what does not
depend on time: the texts of `prompts.jsonl`, the rounds of `rounds.parquet`, the positions of `positions.parquet`,
and numbers of `results.json` to nine digits. Floats differ between kinds of CPUs, so `golden.json` names the one it
was made on. The exit code is 1 if a run differs or fails.
"""

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

HERE = Path(__file__).resolve().parent
STORED = HERE / "golden.json"
EVERY = ("executor=eager", "logger=none", "max_new_tokens=40", "verdict_tokens=2000")
FROZEN = "gamma_policy._target_=frozen_costs.FrozenAdaptive"  # adaptive gamma, with costs that are not measured
RUNS = {
    "chain_t1": ["data.limit=6"],
    "chain_t0": ["data.limit=6", "temperature=0", "gamma=5"],
    "tree": ["data.limit=4", "drafter=tree", "gamma=3"],
    "medusa": ["data.limit=4", "drafter=medusa", "gamma=3"],
    "ngram": ["data.limit=4", "drafter=ngram", "drafter.sample=true", "repetition_penalty=1.1"],
    "early_exit": ["data.limit=4", "drafter=early_exit", "temperature=0.8", "top_k=50"],
    "block": ["data.limit=4", "verifier=block", "top_p=0.95"],
    "match": ["data.limit=4", "verifier=match", "drafter=prompt_lookup"],
    "paged_batch": ["data.limit=10", "cache=paged", "batch_size=8", 'stop=["return"]'],
    "adaptive": ["data.limit=6", "gamma_policy=adaptive", FROZEN, "batch_size=2"],
    "encoder_decoder": ["data.limit=5", "drafter=ende"],
    "lenience": ["data.limit=4", "lenience=0.8"],
}
COMPARISON = ["data.limit=4", "drafter=stdlib,ngram,bigram"]
NUMBERS = ("alpha", "alpha_counted", "alpha_on_target_text", "alpha_by_category", "beta_by_position", "counts",
           "block_efficiency", "draft_acceptance_rate", "operations_factor", "c_hat", "acceptance")  # fmt: skip
OF_VERDICT = ("verdict", "passed", "expected", "method", "statistic", "threshold")
OF_PROMPTS = ("id", "prompt", "output", "baseline_output", "rounds", "alpha", "block_efficiency")


def rounded(value: Any) -> Any:
    """The value with every float to nine digits, in a form that does not depend on the order of keys."""
    if isinstance(value, dict):
        return {str(name): rounded(value[name]) for name in sorted(value)}
    if isinstance(value, list | tuple):
        return [rounded(entry) for entry in value]
    return f"{value:.9g}" if isinstance(value, float) else value


def digest(value: Any) -> str:
    """Twelve characters that stand for a value."""
    return hashlib.sha256(json.dumps(rounded(value)).encode()).hexdigest()[:12]


def facts(folder: Path) -> dict[str, Any]:
    """What must not depend on time, of a finished run."""
    result = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    lines = [json.loads(line) for line in (folder / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
    found: dict[str, Any] = {
        "texts": digest([{name: line.get(name) for name in OF_PROMPTS} for line in lines]),
        "lossless": rounded({name: result["lossless"].get(name) for name in OF_VERDICT}),
        "numbers": {name: digest(result[name]) for name in NUMBERS},
        "alpha": rounded(result["alpha"]["mean"]),
        "block_efficiency": rounded(result["block_efficiency"]["mean"]),
    }
    for name in ("rounds", "positions"):
        if (path := folder / f"{name}.parquet").is_file():
            rows = pq.read_table(path)
            found[name] = digest({c: rows[c].to_pylist() for c in rows.column_names if "seconds" not in c})
    return found


def run(name: str, folder: Path) -> dict[str, Any]:
    """Runs one command of the pack in `folder`; returns the facts of each run that it left. Raises RuntimeError."""
    module, words = ("specbench.compare", COMPARISON) if name == "compare" else ("specbench", RUNS[name])
    own = f"name={folder.name}" if module == "specbench.compare" else f"hydra.run.dir={folder}"
    words = [*words, *EVERY, own]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE.parent.parent)])
    done = subprocess.run(
        [sys.executable, "-m", module, *words], env=environment, cwd=folder.parent, capture_output=True, text=True
    )
    found = {
        str(path.parent.name): facts(path.parent)
        for path in sorted(folder.parent.rglob(f"{folder.name}/**/results.json"))
    }
    if done.returncode or not found:
        raise RuntimeError(f"{name} ended with exit code {done.returncode}: {done.stderr.strip()[-2000:]}")
    return found


def differences(old: Any, new: Any, where: str = "") -> Iterator[str]:
    """Where two nested mappings differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted({*old, *new}):
            yield from differences(old.get(name), new.get(name), f"{where}.{name}".lstrip("."))
    elif old != new:
        yield f"{where}: {old} is now {new}"


def main(words: Sequence[str]) -> int:
    """Runs the pack; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="store what the runs give now")
    parser.add_argument("names", nargs="*", help=f"some of {', '.join((*RUNS, 'compare'))}; all if none is named")
    arguments = parser.parse_args(words)
    names = arguments.names or [*RUNS, "compare"]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
        every = dict(zip(names, pool.map(lambda name: attempt(name, Path(folder) / name), names), strict=True))
    failed = [found for found in every.values() if isinstance(found, str)]
    if arguments.write and not failed:
        STORED.write_text(json.dumps({"machine": machine(), "runs": every}, indent=1) + "\n", encoding="utf-8")
        return 0
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    if stored["machine"] != machine():
        print(f"golden.json was made on {stored['machine']}, this is {machine()}: floats may differ")
    changed = [line for name in names for line in differences(stored["runs"][name], every[name], name)]
    print("\n".join([*changed, f"{len(names)} commands, {len(changed)} differences"]))
    return int(bool(changed))


def attempt(name: str, folder: Path) -> dict[str, Any] | str:
    """The facts of a command's runs, or why it failed."""
    try:
        found: dict[str, Any] | str = run(name, folder)
    except RuntimeError as error:
        found = str(error)
    print(f"{name}: {'failed' if isinstance(found, str) else 'done'}", file=sys.stderr)
    return found


def machine() -> str:
    """The CPU, as Linux names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    named = dict(line.split(":", 1) for line in lines if ":" in line)
    fields = {name.strip(): value.strip() for name, value in named.items()}
    return f"{fields.get('model name')}, family {fields.get('cpu family')}, model {fields.get('model')}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
