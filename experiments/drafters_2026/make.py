"""Every drafter: what it accepts, how long it takes, how much faster it decodes, and what it would need to win.

python -m specbench.compare experiment=drafters data.limit=16 name=drafters_t0 temperature=0
python -m specbench.compare experiment=drafters data.limit=16 name=drafters_t1 temperature=1
python -m specbench.compare experiment=smollm2 data=spec_bench data.path=question.jsonl name=drafters_smollm2
python experiments/drafters_2026/make.py outputs/drafters_t0 outputs/drafters_t1 outputs/drafters_smollm2
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import (
    ACCEPTED,
    OF_TIMES,
    TIMES,
    WITHOUT_TIMES,
    Columns,
    Measured,
    Row,
    make,
    multirun,
    number,
    option,
    text,
)
from figures import by_temperature, speedups
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLUMNS: Columns = {"target": option("target"), "drafter": option("drafter"), "temperature": "config/temperature"}
NEEDS = {"round": number("round"), "round to win": number("round_to_win")}
TABLE = {"target": text("target"), "drafter": text("drafter"), **WITHOUT_TIMES, **OF_TIMES, **NEEDS}


def collect(inputs: list[str]) -> Measured:
    """A row for each drafter. "round" is the mean time of a round in plain steps, "round_to_win" the longest with which
    it would be as fast as the fastest drafter of its target and temperature."""
    columns = {**COLUMNS, **ACCEPTED, **TIMES}
    found = multirun(columns, lambda row: (row["target"], row["temperature"], -row["speedup"]))(inputs)
    for row in found.rows:
        rivals = [r["speedup"] for r in found.rows if all(r[key] == row[key] for key in ("target", "temperature"))]
        row |= {"round": row["tau"] / row["speedup"], "round_to_win": row["tau"] / max(rivals)}
    return found


def draw(rows: Sequence[Row]) -> Figure:
    """The speedup of each drafter, with its interval."""

    def panel(axes: Axes, here: list[Row]) -> None:
        one = len({row["target"] for row in rows}) == 1
        names = [row["drafter"] if one else f"{row['target']}: {row['drafter']}" for row in here]
        speedups(axes, here, names, "speedup over plain decoding")

    longest = max(sum(row["temperature"] == t for row in rows) for t in {row["temperature"] for row in rows})
    return by_temperature(rows, panel, (5.6, 1.2 + 0.26 * longest))


if __name__ == "__main__":
    make(__file__, __doc__, collect, TABLE, draw)
