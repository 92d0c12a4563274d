"""Gamma policies and fixed gammas, decoded prompt by prompt in turn, beside what replay of gamma 10's rounds predicts.

python -m specbench.compare experiment=adaptive_gamma --also "gamma_policy=fixed gamma=1,2,3,4,5,6,10"
python experiments/adaptive_gamma/make.py outputs/adaptive_gamma
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import (
    NUMBERS,
    RANKED,
    SPEEDUP,
    Measured,
    Row,
    in_turn,
    interval,
    make,
    number,
    option,
    ratio,
    runs_in,
    text,
)
from figures import distances, named

from specbench.contrib.replay.policies import policies
from specbench.contrib.replay.trace import load_trace
from specbench.results.report.style import MEASURED, OTHER, THEORY
from specbench.stats.replay import Trace, replay, sweep

LARGEST, DRAWS = 10, 6
BOUNDS = ("known_betas", "oracle")
TABLE = {
    "temperature": text("temperature"),
    "policy": text("policy"),
    **RANKED,
    "tokens a round": number("tau"),
    "drafted a round": number("drafted_a_round"),
    "speedup": SPEEDUP,
    "replay predicts": number("replayed", ".3f"),
    "predicted / measured": number("replayed_of_measured", ".3f"),
    "over the best fixed gamma": interval("over_best", "over_low", "over_high"),  # in numbers of earlier commits
}


def policy(result: dict[str, Any]) -> str:
    """The policy of a run, in words."""
    name = option("gamma_policy")(result)
    return f"gamma {result['config']['gamma']}" if name == "fixed" else name


COLUMNS = {
    "policy": policy,
    "temperature": "config/temperature",
    "drafted_a_round": ratio("counts/drafted", "counts/rounds"),
    **NUMBERS,
}


def collect(inputs: list[str]) -> Measured:
    """A row for each policy, gamma and bound, at both temperatures."""
    found = in_turn(COLUMNS)(inputs)
    widest = {run.result["config"]["temperature"]: run.folder for run in runs_in(inputs)
              if policy(run.result) == f"gamma {LARGEST}"}  # fmt: skip
    rows = []
    for temperature, folder in widest.items():
        here = [row for row in found.rows if row["temperature"] == temperature]
        rows += [*here, *replayed(load_trace(folder), here)]
    return Measured(rows, found.machine, found.commit)


def replayed(trace: Trace, rows: Sequence[Row]) -> list[Row]:
    """Adds replay's speedups to the rows of one temperature; returns those of the bounds, which replay alone knows."""
    names = [row["policy"] for row in rows if not row["policy"].startswith("gamma")]
    known = {f"gamma {gamma}": found.speedup for gamma, found in sweep(trace, DRAWS).items()}
    for name, made in policies(trace, [*names, *BOUNDS], [f"gamma_policy.largest={LARGEST}"]):
        known[name] = replay(trace, made, DRAWS).speedup
    for row in rows:
        row["replayed"] = known[row["policy"]]
        row["replayed_of_measured"] = row["replayed"] / row["speedup"]
    temperature = rows[0]["temperature"]
    return [{"temperature": temperature, "policy": f"{name} (replay only)", "replayed": known[name]} for name in BOUNDS]


def draw(rows: Sequence[Row]) -> Figure:
    """Every policy's speedup; what replay predicts as diamonds."""
    figure, panels = plt.subplots(1, 2, figsize=(11, 5.4), sharey=False)
    for axes, temperature in zip(panels, (0, 1), strict=True):
        here = [row for row in rows if row["temperature"] == temperature]
        for y, row in enumerate(here):
            if "speedup" in row:
                colour = OTHER if row["policy"].startswith("gamma") else MEASURED
                axes.errorbar([row["speedup"]], [y], xerr=distances([row]), fmt="o", color=colour, capsize=3)
            axes.plot([row["replayed"]], [y], "D", color=THEORY, mfc="none")
        named(axes, [row["policy"] for row in here], "speedup over plain decoding (diamonds: replay)")
        axes.set_title(f"temperature {temperature}")
    return figure


if __name__ == "__main__":
    make(__file__, __doc__, collect, TABLE, draw)
