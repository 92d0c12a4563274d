"""Does training on total variation give a larger alpha than training on KL? On the same held-out text.

    python -m specbench.train method=distill loss=kl tokens=1000000 hydra.run.dir=outputs/drafter_kl
    python experiments/distillation_loss/make.py

Both drafters began as `shipped:drafter` and saw the same million tokens in the same order. The one of total variation
ships; the first command makes that of KL. Their betas are compared position by
position; the interval is a bootstrap over rows of 512 tokens. `tokens=N` reads the first N held-out tokens only.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from rich.progress import track

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import Cell, Measured, Row, commit, machine, make, text
from figures import distances

from specbench.contrib.training.losses import overlap
from specbench.contrib.training.trainer import text_rows
from specbench.data.stdlib_corpus import read_modules
from specbench.errors import ConfigError
from specbench.models.pretrained import PretrainedModel, load_module, load_tokenizer
from specbench.results.provenance import provenance
from specbench.results.report.style import MEASURED, OTHER

ROW, RESAMPLES = 512, 10_000
DRAFTERS = {"drafter": "shipped:drafter", "drafter_kl": "./outputs/drafter_kl", "drafter_tv": "shipped:drafter_tv"}
DIFFERENCES = (("drafter_tv", "drafter_kl"), ("drafter_kl", "drafter"))
CPU = torch.device("cpu")


def settings(path: str) -> PretrainedModel.Settings:
    """The settings of a checkpoint. Raises ConfigError if it is not there."""
    found = PretrainedModel.Settings(path, weights="pretrained", chat_template="never")
    found.check("drafter.")
    return found


@torch.inference_mode()
def collect(inputs: list[str]) -> Measured:
    """Alpha of each drafter on held-out text, then differences position by position."""
    most = 10**9
    for entry in inputs:
        if not entry.startswith("tokens=") or not entry.removeprefix("tokens=").isdigit():
            raise ConfigError(f"{entry} is not a setting of this comparison: it has tokens=N")
        most = int(entry.removeprefix("tokens="))
    target_settings = settings("shipped:target")
    rows = text_rows(list(read_modules(held_out=True).values()), load_tokenizer(target_settings, "target"), ROW, most)
    target = load_module(target_settings, "target", CPU, torch.float32, 0)
    drafters = [load_module(settings(path), "drafter", CPU, torch.float32, 0) for path in DRAFTERS.values()]
    betas = {name: np.zeros(len(rows)) for name in DRAFTERS}  # mean of each row
    for i, row in enumerate(track(rows, "held out")):
        p = target(row[None]).logits
        for name, drafter in zip(DRAFTERS, drafters, strict=True):
            betas[name][i] = overlap(p, drafter(row[None]).logits).mean()
    found = dict(betas) | {f"{a} - {b}": betas[a] - betas[b] for a, b in DIFFERENCES}
    facts = provenance(CPU)
    lines = [{"drafter": name, "tokens": rows.numel()} | mean_and_interval(of_rows) for name, of_rows in found.items()]
    return Measured(lines, machine(facts, "float32"), commit(facts))


def mean_and_interval(of_rows: npt.NDArray[np.float64]) -> Row:
    """The mean over rows and its 95 % interval, by a bootstrap whose draws are the same for everything."""
    chosen = np.random.default_rng(0).integers(len(of_rows), size=(RESAMPLES, len(of_rows)))
    low, high = np.percentile(of_rows[chosen].mean(1), [2.5, 97.5])
    return {"alpha": float(of_rows.mean()), "low": float(low), "high": float(high)}


def value(name: str) -> Cell:
    """Four digits; of a difference with its sign."""
    return lambda row: f"{row[name]:{'+' if ' - ' in row['drafter'] else ''}.4f}"


TABLE = {"drafter": text("drafter"), "alpha": value("alpha"), "low": value("low"), "high": value("high")}


def draw(rows: Sequence[Row]) -> Figure:
    """Alphas on the left, differences on the right, with their intervals."""
    figure, panels = plt.subplots(1, 2, figsize=(9, 2.6))
    alphas = [row for row in rows if " - " not in row["drafter"]]
    differences = [row for row in rows if row not in alphas]
    for axes, here, what in zip(panels, (alphas, differences), ("alpha", "difference in alpha, paired"), strict=True):
        values = [row["alpha"] for row in here]
        axes.errorbar(values, range(len(here)), xerr=distances(here, "alpha"), fmt="o", color=MEASURED, capsize=3)
        axes.set_yticks(range(len(here)), [row["drafter"] for row in here])
        axes.set_ylim(len(here) - 0.5, -0.5)
        axes.set_xlabel(f"{what}, 95 % interval")
        axes.grid(axis="x")
    panels[1].axvline(0, color=OTHER, linewidth=1, linestyle=":")
    return figure


if __name__ == "__main__":
    make(__file__, __doc__, collect, TABLE, draw)
