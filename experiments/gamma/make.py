"""Which gamma, from the jobs of the multirun.

python -m specbench experiment=gamma
python experiments/gamma/make.py outputs/gamma
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import NUMBERS, SPEEDUP, Row, make, multirun, number, plus_minus, text
from figures import by_temperature, distances, legend

from specbench.results.report.style import MEASURED, OTHER, THEORY

COLUMNS = {"gamma": "config/gamma", "temperature": "config/temperature", **NUMBERS}
TABLE = {
    "gamma": text("gamma"),
    "temperature": text("temperature"),
    "alpha": plus_minus("alpha", 3),
    "tau": number("tau"),
    "c": number("c", ".3f"),
    "v": number("v"),
    "o": number("o"),
    "speedup": SPEEDUP,
    "Theorem 3.8": number("theorem_3_8", unit="x"),
    "corrected": number("corrected", unit="x"),
    "tokens/s": number("speculative_tokens_per_second", ".0f"),
    "lossless": text("lossless"),
}


def order(row: Row) -> tuple[int, float]:
    """By gamma, then by temperature."""
    return row["gamma"], row["temperature"]


def panel(axes: Axes, rows: Sequence[Row]) -> None:
    """Speedup by gamma: measured, and as Theorem 3.8 and its corrected form have it."""
    gammas = [row["gamma"] for row in rows]
    axes.plot(gammas, [row["theorem_3_8"] for row in rows], "D--", color=THEORY, mfc="none", label="Theorem 3.8")
    axes.plot(gammas, [row["corrected"] for row in rows], "_:", color=THEORY, label="corrected: v and o as measured")
    axes.errorbar(gammas, [row["speedup"] for row in rows], yerr=distances(rows), fmt="o-", color=MEASURED, capsize=3,
                  label="measured, 95 % interval")  # fmt: skip
    axes.axhline(1, color=OTHER, linewidth=1, linestyle=":")
    axes.set_xticks(gammas, [f"{gamma:g}" for gamma in gammas])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("gamma")
    axes.set_ylabel("speedup over plain decoding")
    axes.grid(axis="y")


def draw(rows: Sequence[Row]) -> Figure:
    """A panel for each temperature."""
    figure = by_temperature(rows, panel, (5.2, 4))
    legend(figure, 3)
    return figure


if __name__ == "__main__":
    make(__file__, __doc__, multirun(COLUMNS, order), TABLE, draw)
