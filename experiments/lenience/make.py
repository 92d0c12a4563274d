"""What lenience accepts, and how far the output distribution is from the target's.

python -m specbench.compare experiment=lenience name=lenience temperature=1
python experiments/lenience/make.py outputs/lenience
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import ACCEPTED, Cell, Row, make, multirun, number, plus_minus, text

DRIFT = {name: f"drift/{name}" for name in ("tv", "kl", "bound", "repetition", "distinct_2", "baseline_repetition",
                                            "baseline_distinct_2")}  # fmt: skip
COLUMNS = {"temperature": "config/temperature", "lenience": "config/lenience", **ACCEPTED, **DRIFT}
PANELS = {"alpha": "alpha", "tau": "tokens a target call", "tv": "drift: total variation"}


def beside_plain(name: str) -> Cell:
    """A number of the text, and that of plain decoding's."""
    return lambda row: f"{row[name]:.3f} ({row[f'baseline_{name}']:.3f})"


TABLE = {
    "temperature": text("temperature"),
    "l": text("lenience"),
    "alpha": plus_minus("alpha", 3),
    "tau": plus_minus("tau", 2),
    "drift: TV": number("tv", ".3f"),
    "drift: KL, nats": number("kl", ".3f"),
    "largest s(x) l / p(x)": number("bound", ".3f"),
    "repeated 4-grams (plain)": beside_plain("repetition"),
    "distinct 2-grams (plain)": beside_plain("distinct_2"),
}


def draw(rows: Sequence[Row]) -> Figure:
    """Alpha, speedup and drift by lenience, a line for each temperature."""
    figure, panels = plt.subplots(1, len(PANELS), figsize=(10, 3.5))
    levels = sorted({row["lenience"] for row in rows})
    for axes, (name, heading) in zip(panels, PANELS.items(), strict=True):
        for temperature in sorted({row["temperature"] for row in rows}):
            here = sorted((row for row in rows if row["temperature"] == temperature), key=lambda row: row["lenience"])
            x, y = [row["lenience"] for row in here], [row[name] for row in here]
            axes.plot(x, y, "o-", label=f"temperature {temperature:g}")
        axes.set_title(heading)
        axes.set_xlabel("lenience l")
        axes.set_xscale("log")
        axes.set_xticks(levels, [f"{level:g}" for level in levels])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.grid()
    panels[0].legend(fontsize=8)
    return figure


if __name__ == "__main__":
    make(__file__, __doc__, multirun(COLUMNS, lambda row: (row["temperature"], -row["lenience"])), TABLE, draw)
