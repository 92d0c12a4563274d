"""How good `speedup.predicted` is: every second prompt's speedup, from the other prompts of the same process.

python -m specbench -m name=coverage repeats=20 repeats_vary=seed temperature=0,1 logger=none verdict_tokens=0
python experiments/prediction/make.py outputs/coverage
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import Measured, Row, make, measured, number, text
from figures import by_temperature, legend

from specbench.errors import ConfigError
from specbench.results.reader import read_result
from specbench.results.report.style import MEASURED, OTHER

NEAR = 0.03
TABLE = {
    "T": text("temperature"),
    "runs": number("runs", ".0f"),
    "measured": number("measured", ".3f"),
    "predicted": number("predicted", ".3f"),
    "predicted / measured, sd": number("sd", ".1%"),
    f"within {NEAR:.0%}": number("near", ".0%"),
    "within its own interval": number("within", ".0%"),
    "half of that interval": number("half", ".1%"),
    "within 3 %: Theorem 3.8 for the same run": number("near_theory", ".0%"),
}


def collect(inputs: list[str]) -> Measured:
    """A row for each temperature, with the ratio of every run."""
    if len(inputs) != 1:
        raise ConfigError("give one folder, the one that the multirun has written: outputs/coverage")
    results = [read_result(path.parent) for path in sorted(Path(inputs[0]).glob("*/repeat=*/results.json"))]
    temperatures = sorted({float(result["config"]["temperature"]) for result in results})
    return measured([row_of(t, [r for r in results if r["config"]["temperature"] == t]) for t in temperatures], results)


def row_of(temperature: float, results: Sequence[dict[str, Any]]) -> Row:
    """Of the runs at one temperature that could predict."""
    found = [result["speedup"] for result in results if result["speedup"]["predicted"]]
    predicted = np.array([s["predicted"]["speedup"] for s in found])
    truth = np.array([s["predicted"]["measured"] for s in found])
    low, high = np.array([s["predicted"]["ci95"] for s in found]).T
    theory = np.array([s["theorem_3_8"] / s["measured"] for s in found])
    ratios = predicted / truth
    row: Row = {"temperature": temperature, "runs": len(found), "measured": truth.mean(), "predicted": predicted.mean()}
    row |= {"sd": ratios.std(ddof=1), "near": np.mean(np.abs(ratios - 1) <= NEAR)}
    row |= {"within": np.mean((low <= truth) & (truth <= high)), "half": np.mean((high - low) / (high + low))}
    row |= {"near_theory": np.mean(np.abs(theory - 1) <= NEAR)}
    return row | {f"run_{number}": ratio for number, ratio in enumerate(ratios)}


def draw(rows: Sequence[Row]) -> Figure:
    """Predicted over measured, a dot for each run."""

    def dots(axes: Any, here: list[Row]) -> None:
        ratios = [value for name, value in here[0].items() if name.startswith("run_")]
        axes.axhspan(1 - NEAR, 1 + NEAR, color=OTHER, alpha=0.25, label=f"within {NEAR:.0%}")
        axes.plot(ratios, "o", color=MEASURED)
        axes.set_xlabel("run")
        axes.set_ylabel("predicted / measured")
        axes.set_xticks(range(0, len(ratios), 5))

    figure = by_temperature(rows, dots, (4.8, 3.6))
    legend(figure, 1)
    return figure


if __name__ == "__main__":
    make(__file__, __doc__, collect, TABLE, draw)
