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
from common import Cell, Measured, Row, interval, make, multirun, number, option, text

from specbench.errors import ConfigError
from specbench.results.latency_table import DELAYS, NAMES, served_rows
from specbench.results.report.style import MEASURED, OTHER, THEORY
from specbench.stats.latency import enough

PERCENTILES = {50: "o", 90: "|", 99: "D"}
RATIO = "first_token", 90  # what the lenience policies are compared in


def of_job(result: dict[str, Any]) -> list[Row]:
    """A row for each decoder of a job. Seconds; a percentile that too few requests are beyond is left out. Raises
    ConfigError if the job is of a version whose clock ran on while it recorded."""
    if not result.get("latency_by_rate"):
        raise ConfigError("these jobs have no latency_by_rate: run the experiment again")
    rows = []
    (at_rate,) = result["latency_by_rate"]
    delay, percentile = RATIO
    ratio = at_rate["ratio"][delay][f"p{percentile}"] if enough(percentile, at_rate["requests"]) else None
    low, high = (ratio and ratio["ci95"]) or (None, None)
    for served in served_rows(result):
        row = {"lenience_policy": option("lenience_policy")(result), "decoder": NAMES[served.way]}
        row |= {"segments": at_rate["segments"], "requests": served.requests}
        row |= {f"{delay}_p{p}": served.percentile(delay, p) for delay in DELAYS for p in PERCENTILES}
        speculative = served.way == "speculative"
        rows.append(row | {"alpha": result["alpha"]["mean"] if speculative else None,
                           "tv": result["drift"]["tv"] if speculative else 0.0,
                           "ratio": ratio["factor"] if ratio and speculative else None,
                           "low": low if speculative else None, "high": high if speculative else None})  # fmt: skip
    return rows


def collect(inputs: list[str]) -> Measured:
    """The decoders of all jobs."""
    jobs = multirun({"name": option("lenience_policy"), "rows": of_job}, lambda row: row["name"])(inputs)
    return Measured([row for job in jobs.rows for row in job["rows"]], jobs.machine, jobs.commit)


def delays(name: str, form: str, scale: float) -> Cell:
    """The percentiles of a delay."""

    def cell(row: Row) -> str:
        found = [row.get(f"{name}_p{p}") for p in PERCENTILES]
        return " / ".join("too few" if value is None else f"{value * scale:{form}}" for value in found)

    return cell


TABLE = {
    "lenience policy": text("lenience_policy"),
    "decoder": text("decoder"),
    "segments": text("segments"),
    "requests": text("requests"),
    "queue, s: p50 / p90 / p99": delays("queue", ".2f", 1),
    "first token, s": delays("first_token", ".2f", 1),
    "per token, ms": delays("per_token", ".2f", 1e3),
    "first token p90 over plain decoding's": interval("ratio", "low", "high"),
    "alpha": number("alpha", ".3f"),
    "drift: TV": number("tv", ".3f"),
}


def draw(rows: Sequence[Row]) -> Figure:
    """The percentiles of each delay, a line for each decoder of each job."""
    figure, panels = plt.subplots(1, len(DELAYS), figsize=(11, 1.9 + 0.42 * len(rows)), sharey=True)
    for axes, (delay, (heading, scale)) in zip(panels, DELAYS.items(), strict=True):
        for y, row in enumerate(rows):
            found = {m: row[f"{delay}_p{p}"] * scale for p, m in PERCENTILES.items() if f"{delay}_p{p}" in row}
            axes.plot([*found.values()], [y] * len(found), color=OTHER, linewidth=1)
            for marker, value in found.items():
                colour = THEORY if row["decoder"] == "plain" else MEASURED
                axes.plot(value, y, marker, color=colour, markersize=7, mfc="none")
        axes.set_title(heading)
        axes.set_xlabel("milliseconds" if scale > 1 else "seconds")
        axes.set_xlim(left=0)
        axes.grid(axis="x")
    panels[0].set_yticks(range(len(rows)), [f"{row['lenience_policy']}, {row['decoder']}" for row in rows])
    panels[0].set_ylim(len(rows) - 0.5, -0.5)
    handles = [Line2D([], [], color=OTHER, marker=marker, linestyle="", mfc="none", label=f"p{p}")
               for p, marker in PERCENTILES.items()]  # fmt: skip
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return figure


if __name__ == "__main__":
    make(__file__, __doc__, collect, TABLE, draw)
