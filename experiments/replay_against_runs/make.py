"""Replay of a run with gamma 4 against real runs with gamma 1, 2, 3 and 6, prompt by prompt in one process.

    python experiments/replay_against_runs/make.py
    python experiments/replay_against_runs/make.py 2          # at most two more settings; stored ones are not run again
    python experiments/replay_against_runs/make.py --stored   # table and figure again, from results.csv

Each setting is a comparison of its own, a minute or two on two cores, and is kept in outputs/replay_against_runs. In it
the run with gamma 4 alone probes costs and reads texts. A machine that is not steady would give no replay: here it is
replayed all the same, and the table says so.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import Measured, Row, make, measured, number, runs_in, text

from specbench.contrib.replay import trace
from specbench.errors import ConfigError
from specbench.results.reader import StoredRun
from specbench.results.report.style import MEASURED, OTHER
from specbench.run.compare_command import compare_sweep
from specbench.run.interleave import InterleavedGroup, MethodRun
from specbench.stats.estimates import CostCheck
from specbench.stats.gamma_sweep import checked_costs, over_own
from specbench.stats.replay import Trace, priced, sweep_rounds

GAMMAS, OWN = (1, 2, 3, 6), 4
SHARED = ["gamma=1,2,3,4,6", "verdict_tokens=0", "logger=none", "max_new_tokens=32"]
TINY = ["target.path=shipped:drafter", "drafter.path=shipped:drafter_tv"]
SETTINGS = {
    "stdlib, T 0": ["temperature=0"],
    "stdlib, T 1": [],
    "bigram, T 0": ["drafter=bigram", "temperature=0"],
    "bigram, T 1": ["drafter=bigram"],
    "stdlib_tv, prose, T 0": ["drafter=stdlib_tv", "data.kind=prose", "temperature=0"],
    "stdlib_tv, prose, T 1": ["drafter=stdlib_tv", "data.kind=prose"],
    "stdlib, 64 tokens, T 0": ["max_new_tokens=64", "temperature=0"],
    "unigram, T 1": ["drafter=unigram"],
    "tiny pair, T 0": [*TINY, "temperature=0"],
    "tiny pair, T 1": [*TINY],
}
STORED = Path("outputs/replay_against_runs")


def is_stored(folder: Path) -> bool:
    """Whether all ways of a comparison were measured to their end."""
    runs = runs_in([str(folder)]) if (folder / "comparison.json").is_file() else []
    return [run.result["status"] for run in runs] == ["complete"] * (len(GAMMAS) + 1)


def run_setting(number: int, overrides: Sequence[str]) -> list[StoredRun]:
    """The comparison of one setting: what is stored, or else a new one."""
    folder = STORED / str(number)
    if not is_stored(folder):
        keys = {word.partition("=")[0] for word in overrides}
        shared = [word for word in SHARED if word.partition("=")[0] not in keys]
        compare_sweep([*shared, *overrides, f"name=replay_against_runs/{number}"])
    return runs_in([str(folder)])


def rows_of(setting: str, runs: Sequence[StoredRun]) -> list[Row]:
    """A row for each other gamma."""
    results = {run.result["gamma"]: run.result for run in runs}
    folder = next(run.folder for run in runs if run.result["gamma"] == OWN)
    replayed = unguarded_trace(folder)
    rounds = sweep_rounds(replayed)
    check = priced(replayed, rounds[0])
    found = []
    for gamma in GAMMAS:
        real = results[gamma]["speedup"]["measured"] / results[OWN]["speedup"]["measured"]
        factor = over_own(replayed, rounds[gamma], rounds[OWN], chosen=False)
        low, high = factor.ci95 or (0.0, np.inf)
        error = real_error(runs, gamma)
        wide = np.hypot(np.log(high / low) / 2, 2 * error) if factor.ci95 else np.inf
        row: Row = {"setting": setting, "gamma": gamma, "real": real, "real_error": error, "replayed": factor.factor}
        row |= {"low": low, "high": high, "half": np.log(high / low) / 2, "inside": float(low <= real <= high)}
        row |= {"inside_both": float(abs(np.log(real / factor.factor)) <= wide), "gamma_0": check.speedup}
        low, high = check.ci95 or (0.0, np.inf)
        row |= {"gamma_0_low": low, "gamma_0_high": high, "steady": float(results[OWN]["machine"]["steady"])}
        check_own = own_check(next(run for run in runs if run.result["gamma"] == OWN), replayed)
        low, high = check_own.ci95 or (0.0, np.inf)
        row |= {"own": check_own.factor, "own_low": low, "own_high": high}
        found.append(row)
    return found


def own_check(run: StoredRun, replayed: Trace) -> CostCheck:
    """The time that replay charges for the rounds of a stored run, over the time that they took."""
    place = {text.prompt: number for number, text in enumerate(replayed.texts)}
    rounds = np.zeros((len(place), replayed.largest + 1))
    for each in run.rounds:
        rounds[place[each["prompt"]], min(each["steps"], replayed.largest)] += 1
    seconds = {record["id"]: record["decode_seconds"] for record in run.prompts}
    return checked_costs(replayed, np.array([seconds[name] for name in place]), rounds)


def unguarded_trace(folder: Path) -> Trace:
    """The trace of a run, also if the machine was not steady, or its costs are not those of its own rounds."""
    load = trace.load_run

    def loaded(folder: Path) -> StoredRun:
        run = load(folder)
        run.result["no_replay"] = ""
        return run

    trace.load_run = loaded
    try:
        return trace.load_trace(folder)
    finally:
        trace.load_run = load


def real_error(runs: Sequence[StoredRun], gamma: int) -> float:
    """The standard error of the logarithm of the real ratio: a jackknife over prompts, which both runs decoded."""
    prompts = {run.result["gamma"]: run.prompts for run in runs}
    times = [
        np.array([[p["decode_seconds"], p["tokens"]] for p in sorted(prompts[g], key=lambda p: p["id"])], float)
        for g in (gamma, OWN)
    ]
    parts = [np.log((each.sum(0) - each)[:, 0] / (each.sum(0) - each)[:, 1]) for each in times]
    left_out = parts[1] - parts[0]
    return float(np.sqrt((len(left_out) - 1) * left_out.var()))


def collect(inputs: list[str]) -> Measured:
    """The rows of every setting that is measured; those that are not are measured first, as many as are asked for."""
    reads = MethodRun.reads_texts.fget

    def gamma_4(group: InterleavedGroup, number: int) -> list[MethodRun]:
        return [member for member in group.members if member.parts.policy.constant == OWN]

    InterleavedGroup.to_probe = gamma_4  # type: ignore[method-assign]
    MethodRun.reads_texts = property(lambda m: m.parts.policy.constant == OWN and reads(m))  # type: ignore
    left = int(inputs[0]) if inputs else len(SETTINGS)
    rows: list[Row] = []
    results: list[dict[str, Any]] = []
    for place, (setting, overrides) in enumerate(SETTINGS.items(), 1):
        is_new = not is_stored(STORED / str(place))
        if is_new and left < 1:
            continue
        left -= is_new
        runs = run_setting(place, overrides)
        rows += rows_of(setting, runs)
        results += [run.result for run in runs]
    if not rows:
        raise ConfigError("nothing is measured")
    inside, both = (sum(row[name] for row in rows) for name in ("inside", "inside_both"))
    print(json.dumps({"comparisons": len(rows), "inside": inside, "inside with the real run's error": both,
                      "median half": float(np.median([row["half"] for row in rows]))}))  # fmt: skip
    return measured(rows, results)


TABLE = {
    "setting": text("setting"),
    "gamma": number("gamma", ".0f"),
    "real, over gamma 4": lambda row: f"{row['real']:.3f} ± {row['real'] * row['real_error']:.3f}",
    "replayed": lambda row: f"{row['replayed']:.3f} ({row['low']:.3f}-{row['high']:.3f})",
    "half": number("half", ".1%"),
    "inside": number("inside", ".0f"),
    "inside, with the real run's error": number("inside_both", ".0f"),
    "gamma 0 replayed": lambda row: f"{row['gamma_0']:.3f} ({row['gamma_0_low']:.3f}-{row['gamma_0_high']:.3f})",
    "own rounds, charged over taken": lambda row: f"{row['own']:.3f} ({row['own_low']:.3f}-{row['own_high']:.3f})",
    "steady": number("steady", ".0f"),
}


def draw(rows: Sequence[Row]) -> Figure:
    """Replayed over real ratios, with replay's intervals."""
    figure, axes = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    for place, row in enumerate(rows):
        axes.plot([place] * 2, [row["low"] / row["real"], row["high"] / row["real"]], color=OTHER)
        axes.plot(place, row["replayed"] / row["real"], "o", color=MEASURED, markersize=3)
    axes.axhline(1, color=OTHER, linewidth=0.8)
    axes.set_xlabel("comparison, in the order of the table")
    axes.set_ylabel("replayed / real")
    return figure


if __name__ == "__main__":
    make(__file__, __doc__, collect, TABLE, draw)
