"""What does training the target together with its heads change (Medusa-2), beside heads alone (Medusa-1)?

    python experiments/medusa2/make.py outputs/train/medusa1 outputs/train/medusa2

The folders are those of the two trainings of README.md, which have seen the same tokens. All numbers are of the same
held-out text, by teacher forcing; heads are compared with their own target: the one of both trainings is not the same.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import Measured, Row, commit, machine, make, number, text

from specbench.errors import ConfigError
from specbench.results.report.style import MARKERS, SERIES

WAYS = ("heads", "target and heads")


def collect(inputs: list[str]) -> Measured:
    """A row for each training."""
    if len(inputs) != 2:
        raise ConfigError("give two folders: of the training of heads alone, and of that of target and heads")
    found = [json.loads((Path(folder) / "metrics.json").read_text(encoding="utf-8")) for folder in inputs]
    rows = [row_of(way, metrics) for way, metrics in zip(WAYS, found, strict=True)]
    machines, commits = (
        dict.fromkeys(told(m) for m in found)
        for told in (lambda m: machine(m["provenance"], "float32"), lambda m: commit(m["provenance"]))
    )
    return Measured(rows, "; ".join(machines), ", ".join(commits))


def row_of(way: str, metrics: dict[str, Any]) -> Row:
    """What a training measured."""
    shares = {f"{name}_{k}": share for name in ("alpha", "agreement")
              for k, share in enumerate(metrics[f"{name}_by_guess"], 1)}  # fmt: skip
    training = {"tokens": metrics["training"]["tokens"], "positions": metrics["held_out_positions"]}
    return {"trained": way, **training, **shares, **metrics["further"]}


HEADS = (1, 2, 3, 4)
TABLE = {
    "trained": text("trained"), "tokens": number("tokens", ".0f"),
    **{f"argmax of head {k}": number(f"agreement_{k}", ".3f") for k in HEADS},
    **{f"overlap of head {k}": number(f"alpha_{k}", ".3f") for k in HEADS},
    "1 - TV from the old target": number("overlap_with_target", ".3f"),
    "argmax as the old target's": number("agreement_with_target", ".3f"),
    "nats of a token, old": number("target_nats", ".3f"), "new": number("nats", ".3f"),
}  # fmt: skip


def draw(rows: Sequence[Row]) -> Figure:
    """Agreement of each head with its target's argmax."""
    figure, axes = plt.subplots(figsize=(5.6, 3.2))
    for place, row in enumerate(rows):
        values = [row[f"agreement_{k}"] for k in HEADS]
        axes.plot(HEADS, values, marker=MARKERS[place], color=SERIES[place], label=f"trained: {row['trained']}")
    axes.set_xticks(HEADS)
    axes.set_xlabel("head")
    axes.set_ylabel("agreement of argmaxes, held-out text")
    axes.set_ylim(0)
    axes.legend()
    axes.grid()
    return figure


if __name__ == "__main__":
    make(__file__, __doc__, collect, TABLE, draw)
