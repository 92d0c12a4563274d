"""Coverage of three intervals for several processes on the same prompts, where the truth is known: simulated times.

python experiments/coverage/make.py
"""

import sys
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from rich.progress import track

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import Measured, Row, commit, here, machine, make, number, text

from specbench.errors import ConfigError
from specbench.results.report.style import MARKERS, OTHER
from specbench.stats.formulas import speedup_of
from specbench.stats.two_way_bootstrap import TwoWaySums

PROMPTS, TIMES, SAMPLES = 32, 1000, 500
PROCESSES = (3, 5, 10)
SPREADS = ((0.0, 0.2, 0.1), (0.02, 0.1, 0.1), (0.05, 0.05, 0.1), (0.1, 0.02, 0.02))  # of processes, prompts, the rest
VARY = ("processes' seconds", "prompts' seconds", "the rest")
WAYS = ("repeats=R", "two-way bootstrap", "bootstrap over prompts")
SUMS = ("plain_seconds", "plain_tokens", "seconds", "tokens")
Floats = np.ndarray[Any, np.dtype[np.float64]]


def simulated(rng: np.random.Generator, processes: int, spreads: tuple[float, float, float]) -> Floats:
    """Seconds [processes, prompts] whose logarithms have these standard deviations."""
    of_process, of_prompt, rest = spreads
    noise = of_process * rng.standard_normal((processes, 1)) + of_prompt * rng.standard_normal((1, PROMPTS))
    seconds: Floats = np.exp(noise + rest * rng.standard_normal((processes, PROMPTS)))
    return seconds


def crossed(seconds: Floats) -> tuple[float, float]:
    """The interval of `repeats=R`, of the logarithm of the speedup."""
    ones = np.ones_like(seconds)
    table = np.stack([ones, ones, seconds, ones])
    sums = TwoWaySums(dict(zip(SUMS, table.sum((1, 2)), strict=True)), table)

    def speedup(s: Mapping[str, Any]) -> dict[str, Any]:
        return {"speedup": speedup_of(s)}

    low, high = np.log(sums.intervals(speedup)["speedup"] or (np.nan, np.nan))
    return low, high


def bootstrap(rng: np.random.Generator, seconds: Floats, both: bool) -> tuple[float, float]:
    """Percentiles over prompts drawn with replacement, and with `both` over processes too."""
    processes, prompts = seconds.shape
    columns = rng.multinomial(prompts, np.full(prompts, 1 / prompts), SAMPLES)
    rows = np.ones((SAMPLES, processes))
    if both:
        rows = rng.multinomial(processes, np.full(processes, 1 / processes), SAMPLES)
    means = np.einsum("sp,pc,sc->s", rows, seconds, columns) / (rows.sum(1) * prompts)
    low, high = np.percentile(-np.log(means), [2.5, 97.5])
    return float(low), float(high)


def coverage(processes: int, spreads: tuple[float, float, float]) -> list[float]:
    """The shares of the three intervals that hold the truth, the logarithm of the ratio of expectations."""
    rng, truth, hits = np.random.default_rng(0), -np.square(spreads).sum() / 2, np.zeros(3)
    for _ in range(TIMES):
        seconds = simulated(rng, processes, spreads)
        ends = crossed(seconds), bootstrap(rng, seconds, both=True), bootstrap(rng, seconds, both=False)
        hits += [low < truth < high for low, high in ends]
    return list(hits / TIMES)


def collect(inputs: list[str]) -> Measured:
    """A row for each number of processes and each spread."""
    if inputs:
        raise ConfigError(f"{inputs[0]} is not a setting of this simulation: it has none")
    facts, rows = here(), []
    for spreads, processes in track([*product(SPREADS, PROCESSES)], "simulating"):
        names = (*WAYS, *VARY, "processes")
        rows.append(dict(zip(names, (*coverage(processes, spreads), *spreads, processes), strict=True)))
    return Measured(rows, machine(facts, "float64"), commit(facts))


def draw(rows: Sequence[Row]) -> Figure:
    """The shares that were held, a group for each row."""
    figure, axes = plt.subplots(figsize=(8, 4.4), layout="constrained")
    for place, name in enumerate(WAYS):
        axes.plot([row[name] for row in rows], range(len(rows)), MARKERS[place], label=name)
    axes.axvline(0.95, color=OTHER, linewidth=1, linestyle=":")
    names = [f"{row['processes']:g} processes; {', '.join(f'{row[name]:g}' for name in VARY)}" for row in rows]
    axes.set_yticks(range(len(rows)), names)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("share of 95 % intervals that hold the truth")
    axes.legend(fontsize=8)
    return figure


TABLE = {
    "processes": text("processes"),
    **{f"sd of {name}": text(name) for name in VARY},
    **{name: number(name, ".3f") for name in WAYS},
}

if __name__ == "__main__":
    make(__file__, __doc__, collect, TABLE, draw)
