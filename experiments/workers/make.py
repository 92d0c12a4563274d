"""What two workers give on two cores, and what a simulation says for more.

OMP_NUM_THREADS=1 python -m specbench -m name=workers workers=1,2 seed=0,1 data.limit=10 logger=none
python experiments/workers/make.py outputs/workers
"""

import pickle
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import Measured, Row, make, measured, number, runs_in, text
from simulate import Seconds, World, simulate

from specbench.errors import ConfigError
from specbench.results.reader import StoredRun
from specbench.results.report.style import MEASURED, OTHER, THEORY

WORKERS = (1, 2, 8, 64, 512)
GROUPS = 4096  # of a simulated run
SEEDS = 3
GB = 1e9
WORLDS = {  # what is not measured here is assumed
    "alike": World(),
    "speeds vary": World(spread=0.1, stragglers=0.05),
    "shared file system": World(spread=0.1, stragglers=0.05, shared_bytes_per_second=GB),
    "and deaths": World(spread=0.1, stragglers=0.05, shared_bytes_per_second=GB, deaths_an_hour=0.2),
}
WEIGHTS = {"included pair": None, "8B and 1B in 16 bits": 18 * GB}  # bytes that a machine reads; None: as measured
TABLE = {
    "": text("what"),
    "workers": text("workers"),
    "world": text("world"),
    "weights": text("weights"),
    "requests a minute": number("requests_per_minute", ".1f"),
    "of one worker's": number("times", ".2f", "x"),
    "efficiency": number("efficiency", ".2f"),
    "tokens/s of a worker": number("tokens_per_second", ".1f"),
    "plain": number("plain_tokens_per_second", ".1f"),
    "speedup": number("speedup", ".2f", "x"),
    "start, s": number("start_seconds", ".1f"),
    "decoding, s": number("decoding_seconds", ".1f"),
    "taking groups, s": number("taking_seconds", ".1f"),
    "died": number("died", ".0f"),
}


def collect(inputs: list[str]) -> Measured:
    """Measured rows, and simulated ones. Raises ConfigError."""
    runs = runs_in(inputs)
    by_count = {count: [run for run in runs if run.result["config"]["workers"] == count] for count in (1, 2)}
    if not all(by_count.values()):
        raise ConfigError("give the folder of a multirun with workers=1,2")
    rows = [one for count, found in by_count.items() for one in [_measured(count, found)]]
    for row in rows:
        row["times"] = row["requests_per_minute"] / rows[0]["requests_per_minute"]
        row["efficiency"] = row["times"] / row["workers"]
    seconds = seconds_of(by_count[2])
    rows += [_row("cost of a " + name, value) for name, value in _costs(seconds).items()]
    for weights, size in WEIGHTS.items():
        for world in list(WORLDS)[2:] if size else list(WORLDS)[:2]:
            rows += _simulated(seconds, weights, size, world)
    return measured(rows, [run.result for run in runs])


def _measured(count: int, runs: list[StoredRun]) -> Row:
    """Runs on so many workers, pooled."""
    requests = sum(run.result["counts"]["prompts"] for run in runs)
    decoding = sum(decoding_seconds(run.result) for run in runs)
    rates = [run.result["throughput"] for run in runs]
    return {
        "what": "measured",
        "workers": count,
        "requests_per_minute": 60 * requests / decoding,
        "tokens_per_second": float(np.mean([rate["speculative_tokens_per_second"] for rate in rates])),
        "plain_tokens_per_second": float(np.mean([rate["baseline_tokens_per_second"] for rate in rates])),
        "speedup": float(np.exp(np.mean([np.log(run.result["speedup"]["measured"]) for run in runs]))),
        "start_seconds": float(np.mean([run.result["seconds"]["load"] for run in runs])),
        "decoding_seconds": decoding / len(runs),
    }


def decoding_seconds(result: dict[str, Any]) -> float:
    """Wall-clock seconds from the first warm-up until the last group."""
    phases = result["seconds"]
    names = ("decoding", "warm_up", "probes", "plain", "speculative", "peers", "betas", "verdict")
    return float(sum(phases.get(name, 0.0) for name in names))


def seconds_of(runs: list[StoredRun]) -> Seconds:
    """The costs for the simulation, from runs on two workers. What a request takes with everything is its decoding
    time, scaled so that the sum is what the workers were busy for."""
    groups: list[float] = []
    for run in runs:
        ways = ("decode", "baseline_decode")
        own = [sum(line[f"{way}_seconds"] for way in ways) for line in run.prompts]
        busy = sum(worker["seconds"] for worker in run.result["workers"])
        groups += [value * busy / sum(own) for value in own]
    results = [run.result for run in runs]
    workers = [worker for result in results for worker in result["workers"]]
    load = float(np.mean([worker["load_seconds"] for worker in workers]))
    first = float(np.mean([result["seconds"]["load"] for result in results]))
    busy = float(np.mean([max(worker["seconds"] for worker in result["workers"]) for result in results]))
    warm_up = max(0.0, float(np.mean([decoding_seconds(result) for result in results])) - busy)
    return Seconds(
        groups=groups,
        process=max(0.0, first - load),
        load=load,
        warm_up=warm_up,
        take=float(np.mean([taking(run) for run in runs])),
        weights=float(np.mean([result["memory"]["weights_bytes"] for result in results])),
    )


def taking(run: StoredRun, times: int = 20) -> float:
    """Seconds in which a request's line and rounds, which are most of what a worker sends, go through pickle and back,
    and the line to a file."""
    prompt, path = run.prompts[0], run.folder / "taking.tmp"
    sent = prompt, [r for r in run.rounds if r["prompt"] == prompt["id"]], run.positions
    begun = time.perf_counter()
    for _ in range(times):
        pickle.loads(pickle.dumps(sent))
        with path.open("a") as file:
            file.write(str(sent[0]) + "\n")
    path.unlink()
    return (time.perf_counter() - begun) / times


def _costs(seconds: Seconds) -> dict[str, float]:
    return {
        "request": float(np.mean(seconds.groups)),
        "worker's process": seconds.process,
        "load": seconds.load,
        "warm-up": seconds.warm_up,
        "group's taking": seconds.take,
    }


def _row(what: str, value: float) -> Row:
    return {"what": what, "decoding_seconds": value}


def _simulated(seconds: Seconds, weights: str, size: float | None, world: str) -> list[Row]:
    """Rows of each number of workers. A larger target's requests take as long here: only its loading differs."""
    costs = seconds if size is None else Seconds(**{**vars(seconds), "weights": size})
    rows: list[Row] = []
    for count in WORKERS:
        found = [simulate(costs, WORLDS[world], count, GROUPS, seed) for seed in range(SEEDS)]
        mean = {name: float(np.mean([vars(one)[name] for one in found])) for name in vars(found[0])}
        all_seconds = mean["start"] + mean["decoding"]
        alone = rows[0]["all_seconds"] if rows else all_seconds
        rows.append({
            "what": "simulated", "workers": count, "world": world, "weights": weights, "all_seconds": all_seconds,
            "requests_per_minute": 60 * GROUPS / all_seconds, "times": alone / all_seconds,
            "efficiency": alone / all_seconds / count, "start_seconds": mean["start"],
            "decoding_seconds": mean["decoding"], "taking_seconds": mean["taking"], "died": mean["died"],
        })  # fmt: skip
    return rows


def draw(rows: list[Row]) -> Figure:
    """Times as fast as one worker, by workers."""
    figure, axes = plt.subplots(figsize=(6.5, 4.2))
    simulated = [row for row in rows if row["what"] == "simulated"]
    names = dict.fromkeys((row["world"], row["weights"]) for row in simulated)
    for place, name in enumerate(names):
        own = [row for row in simulated if (row["world"], row["weights"]) == name]
        axes.plot([row["workers"] for row in own], [row["times"] for row in own], marker="o", markersize=3,
                  color=THEORY, alpha=1 - 0.7 * place / len(names), label=", ".join(name))  # fmt: skip
    own = [row for row in rows if row["what"] == "measured"]
    axes.plot([row["workers"] for row in own], [row["times"] for row in own], "s", color=MEASURED, label="measured")
    axes.plot(WORKERS, WORKERS, ":", color=OTHER, linewidth=1, label="as many as workers")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(WORKERS, [str(count) for count in WORKERS])
    axes.set_xlabel("workers")
    axes.set_ylabel(f"times as fast as one, {GROUPS:,} requests")
    axes.legend(fontsize=7)
    return figure


if __name__ == "__main__":
    make(__file__, __doc__, collect, TABLE, draw)
