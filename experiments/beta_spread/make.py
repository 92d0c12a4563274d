"""How betas spread within and between the prompts of finished runs: could a policy foresee them?

python -m specbench -m name=beta_spread temperature=0,1
python experiments/beta_spread/make.py outputs/beta_spread
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import Measured, Row, make, measured, number, runs_in, text

SPREADS = {"within": "within a prompt", "between": "between prompts"}
TABLE = {
    "temperature": text("temperature"),
    "positions": number("positions", ",.0f"),
    "mean beta": number("beta", ".3f"),
    "standard deviation within a prompt": number("within"),
    "of the prompts' means": number("between"),
    "correlation with the next token's beta": number("correlation"),
    "mean beta, lowest tenth of max q": number("lowest_tenth"),
    "highest tenth": number("highest_tenth"),
}


def collect(inputs: list[str]) -> Measured:
    """A row for each job."""
    runs = runs_in(inputs)
    rows = [
        {"temperature": run.result["config"]["temperature"]} | spread(pd.read_parquet(run.folder / "positions.parquet"))
        for run in runs
    ]
    return measured(sorted(rows, key=lambda row: row["temperature"]), [run.result for run in runs])


def spread(positions: pd.DataFrame) -> Row:
    """Of the betas along all texts."""
    known = positions.dropna(subset="beta")
    prompts = known.groupby("prompt")["beta"]
    apart = known["beta"] - prompts.transform("mean")
    tenths = pd.qcut(known["confidence"], 10, duplicates="drop")
    by_confidence = known.groupby(tenths, observed=True)["beta"].mean()
    return {
        "positions": len(known),
        "beta": float(known["beta"].mean()),
        "within": float(apart.std()),
        "between": float(prompts.mean().std()),
        "correlation": float(apart.corr(apart.groupby(known["prompt"]).shift(-1))),
        "lowest_tenth": float(by_confidence.iloc[0]),
        "highest_tenth": float(by_confidence.iloc[-1]),
    }


def draw(rows: Sequence[Row]) -> Figure:
    """Spread within and between prompts, and the correlation with the next token, by temperature."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.4))
    names = [f"temperature {row['temperature']:g}" for row in rows]
    for place, (name, label) in enumerate(SPREADS.items()):
        bars = left.bar(
            [x + 0.4 * (place - 0.5) for x in range(len(rows))], [row[name] for row in rows], 0.38, label=label
        )
        left.bar_label(bars, fmt="%.2f")
    left.set_title("standard deviation of beta")
    left.legend(fontsize=8)
    bars = right.bar(range(len(rows)), [row["correlation"] for row in rows], 0.5)
    right.bar_label(bars, fmt="%.2f")
    right.set_title("correlation with the next token's beta")
    right.set_ylim(-1, 1)
    for axes in (left, right):
        axes.set_xticks(range(len(rows)), names)
        axes.grid(axis="y")
    return figure


if __name__ == "__main__":
    make(__file__, __doc__, collect, TABLE, draw)
