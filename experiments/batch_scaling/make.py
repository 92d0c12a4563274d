"""Tokens a second of rows decoded together, from the jobs of the multirun; and whether their texts are the same.

python -m specbench experiment=batch_scaling
python experiments/batch_scaling/make.py outputs/batch_scaling
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import ENGINE, NUMBERS, Measured, Row, make, multirun, text

from specbench.results.report.style import OTHER

COLUMNS = {"gamma": "config/gamma", "batch": "config/batch_size", **NUMBERS}
TABLE = {name: text(name) for name in ("gamma", "batch")} | ENGINE


def order(row: Row) -> tuple[int, int]:
    """By gamma, then by rows."""
    return row["gamma"], row["batch"]


def collect(inputs: list[str]) -> Measured:
    """The jobs, and in print how many prompts have not the same text in all of them."""
    measured = multirun(COLUMNS, order)(inputs)
    print(f"different texts among {len(measured.rows)} jobs, over all prompts: {different_texts(Path(inputs[0]))}")
    return measured


def different_texts(folder: Path) -> int:
    """How many prompts have an output, speculative or plain, that is not the same in every job."""
    outputs: dict[str, set[str]] = {}
    for path in folder.glob("*/prompts.jsonl"):
        for record in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            if "error" not in record:
                outputs.setdefault(record["id"], set()).update((record["output"], record["baseline_output"]))
    return sum(len(found) > 1 for found in outputs.values())


def draw(rows: Sequence[Row]) -> Figure:
    """Tokens a second of all rows together, by their number."""
    figure, axes = plt.subplots(figsize=(7, 4.5))
    here: list[Row] = []
    for gamma in sorted({row["gamma"] for row in rows}):
        here = [row for row in rows if row["gamma"] == gamma]
        rates = [row["speculative_tokens_per_second"] for row in here]
        axes.plot([row["batch"] for row in here], rates, marker="o", label=f"speculative, gamma {gamma:g}")
    sizes, plain = [row["batch"] for row in here], [row["baseline_tokens_per_second"] for row in here]
    axes.plot(sizes, plain, marker="s", color=OTHER, label=f"plain decoding, in the runs of gamma {gamma:g}")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
    axes.set_ylim(0)
    axes.set_xlabel("rows decoded together")
    axes.set_ylabel("tokens per second, all rows")
    axes.grid()
    axes.legend()
    return figure


if __name__ == "__main__":
    make(__file__, __doc__, collect, TABLE, draw)
