"""What the default run measures, pooled over several processes, and how far its processes are apart.

python -m specbench -m name=default repeats=20 repeats_vary=seed temperature=1 verdict_tokens=0 logger=none
python experiments/default/make.py outputs/default
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import ACCEPTED, OF_TIMES, TIMES, WITHOUT_TIMES, Measured, Row, make, measured, number, text
from figures import by_temperature

from specbench.errors import ConfigError
from specbench.results.fields import at
from specbench.results.reader import read_result
from specbench.results.report.style import MEASURED, OTHER

LEAST, MOST = "least of a process", "most of a process"
TABLE = (
    WITHOUT_TIMES
    | OF_TIMES
    | {LEAST: number("least", unit="x"), MOST: number("most", unit="x"), "steady": text("steady")}
)


def row_of(folder: Path) -> tuple[Row, list[dict[str, Any]]]:
    """The numbers of one temperature, and the results of its processes."""
    pooled, every = read_result(folder), [read_result(path.parent) for path in sorted(folder.glob("*/results.json"))]
    row = {
        name: at(pooled, where) if isinstance(where, str) else where(pooled)
        for name, where in (ACCEPTED | TIMES).items()
    }
    speeds = [each["speedup"]["measured"] for each in every]
    row |= {"temperature": pooled["config"]["temperature"], "least": min(speeds), "most": max(speeds)}
    row |= {"steady": f"{sum(each['machine']['steady'] for each in every)} of {len(every)}"}
    return row | {f"process_{place}": speed for place, speed in enumerate(speeds)}, every


def collect(inputs: list[str]) -> Measured:
    """A row for each temperature."""
    if len(inputs) != 1:
        raise ConfigError("give one folder, the one that the multirun has written: outputs/default")
    found = [row_of(path.parent) for path in Path(inputs[0]).glob("*/results.json")]
    rows = sorted((row for row, _ in found), key=lambda row: row["temperature"])
    return measured(rows, [result for _, results in found for result in results])


def draw(rows: Sequence[Row]) -> Figure:
    """The speedup of each process, and of all."""

    def dots(axes: Axes, here: list[Row]) -> None:
        [row] = here
        speeds = [value for name, value in row.items() if name.startswith("process_")]
        axes.axvspan(row["low"], row["high"], color=OTHER, alpha=0.25)
        axes.plot(speeds, range(1, 1 + len(speeds)), "o", color=MEASURED)
        axes.set(xlabel="speedup; grey: interval of all", ylabel="process, in the order of time")

    return by_temperature(rows, dots, (4.8, 3.0))


if __name__ == "__main__":
    make(__file__, __doc__, collect, TABLE, draw)
