"""Do two drafters that were trained together accept more than two trained apart, at the same cost? On held-out text.

    python experiments/boosted/make.py t/one t/two t/argmax t/residual tokens=3072

The folders are those of the trainings of README.md: of two drafters trained apart, then of sets trained together. By
teacher forcing, on tokens=N held-out tokens from random places: the probability that one of two guesses is accepted by
iterative speculative sampling, b_1 + (1 - b_1) b_2 with b_2 the overlap of the second drafter with the residual, and
how often one of two argmaxes is the target's. Intervals are a bootstrap over rows of 128 tokens.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import Cell, Measured, Row, commit, machine, make, text

from specbench.contrib.training.trainer import text_rows
from specbench.data.stdlib_corpus import read_modules
from specbench.errors import ConfigError
from specbench.models.pretrained import PretrainedModel, load_module, load_tokenizer
from specbench.results.provenance import provenance
from specbench.results.report.style import MEASURED, OTHER

ROW, RESAMPLES = 128, 10_000
CPU = torch.device("cpu")
APART = "apart"
MEASURES = ("T = 1, in order", "T = 1, random order", "T = 0")


def load(path: str) -> tuple[PretrainedModel.Settings, torch.nn.Module]:
    """A checkpoint's settings and module."""
    settings = PretrainedModel.Settings(path, weights="pretrained", chat_template="never")
    return settings, load_module(settings, "drafter", CPU, torch.float32, 0)


@torch.inference_mode()
def collect(inputs: list[str]) -> Measured:
    """A row for each set and measure, then the differences to the drafters that were trained apart."""
    *folders, size = inputs or [""]
    if len(folders) < 3 or not size.removeprefix("tokens=").isdigit():
        raise ConfigError("give two folders of drafters trained apart, those of sets trained together, and tokens=N")
    sets = {APART: folders[:2]} | {Path(own).name: [f"{own}/drafter_1", f"{own}/drafter_2"] for own in folders[2:]}
    settings, target = load("shipped:target")
    tokenizer, most = load_tokenizer(settings, "target"), int(size.removeprefix("tokens="))
    rows = text_rows([*read_modules(held_out=True).values()], tokenizer, ROW, most, seed=0)
    p = torch.cat([target(part).logits.softmax(-1) for part in rows.split(8)])  # [n, T, V]
    found: dict[tuple[str, str], npt.NDArray[np.float64]] = {}  # means of each row
    for name, paths in sets.items():
        first, second = (load(path)[1](rows).logits.softmax(-1) for path in paths)
        values = (accepted(p, first, second), accepted(p, second, first), hits(p, first, second))
        forward, backward, covered = (value.double().mean(1).numpy() for value in values)
        found |= {(name, measure): value for measure, value in zip(
            MEASURES, (forward, (forward + backward) / 2, covered), strict=True)}  # fmt: skip
    lines = [line(name, measure, own) for (name, measure), own in found.items()]
    lines += [line(f"{name} - {APART}", measure, own - found[APART, measure])
              for (name, measure), own in found.items() if name != APART]  # fmt: skip
    facts = provenance(CPU)
    return Measured(lines, machine(facts, "float32"), commit(facts))


def accepted(p: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """The probability that one of two guesses, drawn from first [..., V] and second [..., V], is accepted: [...]."""
    beta, rest = torch.minimum(p, first).sum(-1), (p - first).clamp(min=0)
    rest = rest / rest.sum(-1, keepdim=True).clamp(min=1e-12)
    return beta + (1 - beta) * torch.minimum(rest, second).sum(-1)


def hits(p: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """1 where one of two argmaxes is that of p [..., V], else 0: [...]."""
    best = p.argmax(-1)
    return (first.argmax(-1) == best) | (second.argmax(-1) == best)


def line(name: str, measure: str, of_rows: npt.NDArray[np.float64]) -> Row:
    """The mean over rows and its 95 % interval, by a bootstrap whose draws are the same for everything."""
    chosen = np.random.default_rng(0).integers(len(of_rows), size=(RESAMPLES, len(of_rows)))
    low, high = np.percentile(of_rows[chosen].mean(1), [2.5, 97.5])
    tokens = len(of_rows) * ROW
    return {"drafters": name, "measure": measure, "tokens": tokens, "alpha": float(of_rows.mean()), "low": float(low),
            "high": float(high)}  # fmt: skip


def value(name: str) -> Cell:
    """Four digits; of a difference with its sign."""
    return lambda row: f"{row[name]:{'+' if ' - ' in row['drafters'] else ''}.4f}"


TABLE = {"drafters": text("drafters"), "measure": text("measure"), "one of two accepted": value("alpha"),
         "low": value("low"), "high": value("high")}  # fmt: skip


def draw(rows: Sequence[Row]) -> Figure:
    """Differences to the drafters that were trained apart."""
    shown = [row for row in rows if " - " in row["drafters"]]
    figure, axes = plt.subplots(figsize=(6.4, 0.8 + 0.35 * len(shown)))
    for place, row in enumerate(shown):
        ends = [[row["alpha"] - row["low"]], [row["high"] - row["alpha"]]]
        axes.errorbar(row["alpha"], place, xerr=ends, fmt="o", color=MEASURED)
    axes.axvline(0, linewidth=1, linestyle=":", color=OTHER)
    axes.set_yticks(range(len(shown)), [f"{row['drafters']}, {row['measure']}" for row in shown])
    axes.invert_yaxis()
    axes.set_xlabel("difference of the share in which one of two guesses is accepted, 95 % interval")
    axes.grid(axis="x")
    return figure


if __name__ == "__main__":
    make(__file__, __doc__, collect, TABLE, draw)
