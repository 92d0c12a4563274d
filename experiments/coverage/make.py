"""How often an interval of 95 % holds what other processes find, from processes on the same prompts.

python -m specbench -m name=coverage repeats=20 repeats_vary=seed temperature=0,1 logger=none verdict_tokens=0
python experiments/coverage/make.py outputs/coverage
"""

import sys
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import Measured, Row, make, measured, number, text
from figures import by_temperature, legend

from specbench.errors import ConfigError
from specbench.results.fields import at
from specbench.results.parquet import load_sums
from specbench.results.reader import read_result
from specbench.results.report.style import MEASURED, OTHER
from specbench.stats.bootstrap import student
from specbench.stats.formulas import cost_ratios, speedup_of
from specbench.stats.two_way_bootstrap import TwoWaySums

POOLED, MOST_SETS = 5, 200  # processes that are pooled, and sets of them that are tried
Ends = tuple[float, float]
TABLE = {
    "T": text("temperature"),
    "number": text("number"),
    "mean": number("mean", ".3f"),
    "sd between processes": number("sd", ".2%"),
    "half interval, one process": number("half", ".2%"),
    "covered, one process": number("covered", ".0%"),
    f"half interval, {POOLED} processes": number("half_pooled", ".2%"),
    f"covered, {POOLED} processes": number("covered_pooled", ".0%"),
}


def formulas(s: Any) -> dict[str, Any]:
    """The numbers whose intervals are tried."""
    cost = cost_ratios(s)
    return {
        "speedup": speedup_of(s),
        "alpha": s["beta"] / s["tested"],
        "tau": s["tokens"] / s["rounds"],
        "c": cost["c"],
        "v": cost["v"],
    }


def of_one(result: dict[str, Any], name: str) -> Ends:
    """The interval that a process gives itself."""
    where = {"speedup": "speedup/ci95", "c": "cost/ci95/c", "v": "cost/ci95/v"}.get(name)
    if where is not None:
        low, high = at(result, where)
        return low, high
    found = result["alpha" if name == "alpha" else "block_efficiency"]
    half = student(result["counts"]["prompts"] - 1) * found["stderr"]
    return found["mean"] - half, found["mean"] + half


def sets(count: int) -> Iterator[tuple[int, ...]]:
    """Sets of POOLED processes, drawn among all that there are."""
    every = [*combinations(range(count), POOLED)]
    chosen = np.random.default_rng(0).permutation(len(every))[:MOST_SETS]
    return (every[number] for number in chosen)


def collect(inputs: list[str]) -> Measured:
    """A row for each number at each temperature."""
    if len(inputs) != 1:
        raise ConfigError("give one folder, the one that the multirun has written: outputs/coverage")
    rows, results = [], []
    for job in sorted({path.parents[1] for path in Path(inputs[0]).glob("*/repeat=*/results.json")}):
        folders = sorted(path.parent for path in job.glob("repeat=*/results.json"))
        found = [read_result(folder) for folder in folders]
        rows += rows_of(found, folders)
        results += found
    return measured(rows, results)


def rows_of(results: Sequence[dict[str, Any]], folders: Sequence[Path]) -> list[Row]:
    """Of the processes of one temperature."""
    sums = [load_sums(folder) for folder in folders]
    values = TwoWaySums.of(lambda: sums).by_process(formulas)
    pooled = [(chosen, TwoWaySums.of(lambda chosen=chosen: [sums[i] for i in chosen]).intervals(formulas))
              for chosen in sets(len(sums))]  # fmt: skip
    rows = []
    for name, of_each in values.items():
        others = [(of_each.sum() - value) / (len(of_each) - 1) for value in of_each]
        ends = [of_one(result, name) for result in results]
        rest = [np.delete(of_each, chosen).mean() for chosen, _ in pooled]
        row = {"temperature": float(results[0]["config"]["temperature"]), "number": name, "processes": len(of_each)}
        row |= {"mean": of_each.mean(), "sd": of_each.std(ddof=1) / of_each.mean()}
        row |= {"half": half(ends), "covered": share(ends, others)}
        if all(intervals[name] is not None for _, intervals in pooled):
            of_sets = [intervals[name] for _, intervals in pooled]
            row |= {"half_pooled": half(of_sets), "covered_pooled": share(of_sets, rest)}
        rows.append(row)
    return rows


def share(ends: Sequence[Ends], truth: Sequence[float]) -> float:
    """The share of intervals that hold what the other processes found."""
    return float(np.mean([low <= value <= high for (low, high), value in zip(ends, truth, strict=True)]))


def half(ends: Sequence[Ends]) -> float:
    """Half an interval over its middle, on average."""
    return float(np.mean([(high - low) / (high + low) for low, high in ends]))


def draw(rows: Sequence[Row]) -> Figure:
    """The share that was covered, by number: of one process, and of POOLED."""

    def bars(axes: Any, here: list[Row]) -> None:
        places = np.arange(len(here))
        for shift, key, colour, label in ((-0.2, "covered", OTHER, "one process"),
                                          (0.2, "covered_pooled", MEASURED, f"{POOLED} processes")):  # fmt: skip
            axes.bar(places + shift, [row.get(key, 0) for row in here], 0.38, color=colour, label=label)
        axes.axhline(0.95, color=OTHER, linestyle=":", linewidth=1)
        axes.set_xticks(places, [row["number"] for row in here])
        axes.set_ylim(0, 1.05)
        axes.set_ylabel("share of 95 % intervals that hold\nwhat the other processes found")

    figure = by_temperature(rows, bars, (5.2, 3.8))
    legend(figure, 2)
    return figure


if __name__ == "__main__":
    make(__file__, __doc__, collect, TABLE, draw)
