"""How long requests wait in a spike, from the jobs of the multirun.

python -m specbench experiment=traffic_spike
python experiments/traffic_spike/make.py outputs/traffic_spike
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import Cell, Measured, Row, make, multirun, number, option, text

from specbench.report.style import MEASURED, OTHER, THEORY

PERCENTILES = {"p50": "o", "p90": "|", "p99": "D"}
DELAYS = {"queue": "in the queue", "first_token": "to the first token", "per_token": "per token after it"}
DECODERS = {"speculative": "speculative", "baseline": "plain"}


def of_job(result: dict[str, Any]) -> list[Row]:
    """A row for each decoder of a job. Seconds."""
    rows = []
    for way, name in DECODERS.items():
        found = result["latency"][way]
        row = {"lenience_policy": option("lenience_policy")(result), "decoder": name}
        row |= {f"{delay}_{p}": found[delay][p] for delay in DELAYS for p in PERCENTILES}
        speculative = way == "speculative"
        rows.append(row | {"alpha": result["alpha"]["mean"] if speculative else None,
                           "tv": result["drift"]["tv"] if speculative else 0.0})  # fmt: skip
    return rows


def collect(inputs: list[str]) -> Measured:
    """The decoders of all jobs."""
    jobs = multirun({"name": option("lenience_policy"), "rows": of_job}, lambda row: row["name"])(inputs)
    return Measured([row for job in jobs.rows for row in job["rows"]], jobs.machine, jobs.commit)


def delays(name: str, form: str, scale: float) -> Cell:
    """The three percentiles of a delay."""
    return lambda row: " / ".join(f"{row[f'{name}_{p}'] * scale:{form}}" for p in PERCENTILES)


TABLE = {
    "lenience policy": text("lenience_policy"),
    "decoder": text("decoder"),
    "queue, s: p50 / p90 / p99": delays("queue", ".2f", 1),
    "first token, s": delays("first_token", ".2f", 1),
    "per token, ms": delays("per_token", ".2f", 1e3),
    "alpha": number("alpha", ".3f"),
    "drift: TV": number("tv", ".3f"),
}


def draw(rows: Sequence[Row]) -> Figure:
    """p50, p90 and p99 of each delay, a line for each decoder of each job."""
    figure, panels = plt.subplots(1, len(DELAYS), figsize=(11, 1.9 + 0.42 * len(rows)), sharey=True)
    for axes, (delay, heading) in zip(panels, DELAYS.items(), strict=True):
        scale = 1e3 if delay == "per_token" else 1
        for y, row in enumerate(rows):
            found = {marker: row[f"{delay}_{p}"] * scale for p, marker in PERCENTILES.items()}
            axes.plot([*found.values()], [y] * len(found), color=OTHER, linewidth=1)
            for marker, value in found.items():
                colour = THEORY if row["decoder"] == "plain" else MEASURED
                axes.plot(value, y, marker, color=colour, markersize=7, mfc="none")
        axes.set_title(heading)
        axes.set_xlabel("milliseconds" if delay == "per_token" else "seconds")
        axes.set_xlim(left=0)
        axes.grid(axis="x")
    panels[0].set_yticks(range(len(rows)), [f"{row['lenience_policy']}, {row['decoder']}" for row in rows])
    panels[0].set_ylim(len(rows) - 0.5, -0.5)
    handles = [Line2D([], [], color=OTHER, marker=m, linestyle="", mfc="none", label=p) for p, m in PERCENTILES.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return figure


if __name__ == "__main__":
    make(__file__, __doc__, collect, TABLE, draw)
