"""The paper's Figures 2 to 5 by `theory.py`, with measured runs added; other tables as prediction and measurement."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from specbench import theory
from specbench.paper.published import PRINTED
from specbench.report.files import Run
from specbench.report.page import legend
from specbench.report.tables import flat

ALPHAS = np.linspace(0, 0.999, 200)
MOST_GAMMA = 25  # of Figure 3
THEORY, MEASURED, OTHER = "#4c72b0", "#c44e52", "#777777"
STAGES = ("draft", "verify", "accept", "host")


def figure(name: str, runs: Sequence[Run]) -> Figure:
    """The figure of a table or figure of the paper."""
    shown, axes = plt.subplots(figsize=(6.4, 4.4), layout="constrained")
    own = {
        "table1": operations,
        "figure1": rounds_in_time,
        "figure2": expected_tokens,
        "figure3": best_gamma,
        "figure4": operations,
        "figure5": rounds_in_time,
    }
    own.get(name, partial(predictions, name))(axes, runs)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        legend(axes, 2)
    return shown


def points(runs: Sequence[Run], name: str) -> tuple[list[float], list[float]]:
    """alpha and another number of the runs that have both."""
    numbers = [flat(run.results) for run in runs]
    found = [(own["alpha/mean"], own[name]) for own in numbers if "alpha/mean" in own and name in own]
    return [alpha for alpha, _ in found], [value for _, value in found]


def expected_tokens(axes: Any, runs: Sequence[Run]) -> None:
    """Figure 2: expected tokens per run of Algorithm 1, by alpha (equation 1)."""
    for gamma in (1, 3, 5, 7, 10):
        curve = [theory.expected_tokens(alpha, gamma) for alpha in ALPHAS]
        axes.plot(ALPHAS, curve, color=THEORY, linewidth=1, label="equation 1")
        axes.annotate(f"gamma {gamma}", (1, curve[-1]), fontsize=8, va="center")
    axes.plot(*points(runs, "block_efficiency/mean"), "o", color=MEASURED, label="measured")
    axes.set(xlabel="alpha", ylabel="tokens a round", xlim=(-0.03, 1.2))


def best_gamma(axes: Any, runs: Sequence[Run]) -> None:
    """Figure 3: the best gamma by alpha (section 3.5), for the paper's c and for the c of each run."""
    ours = {round(run.results["cost"]["c"], 2) for run in runs if run.results["cost"]["c"] is not None}
    styles: list[tuple[float, dict[str, Any]]] = [
        (c, {"color": THEORY, "label": "gamma* of Theorem 3.8"}) for c in (0.01, 0.02, 0.05, 0.1, 0.2)
    ]
    styles += [(c, {"color": MEASURED, "linestyle": "--", "label": "gamma* at the c of a run"}) for c in sorted(ours)]
    grid = np.linspace(0.01, 0.95, 95)
    for c, style in styles:
        best = np.array([theory.optimal_gamma(alpha, c, largest=40) for alpha in grid])
        axes.step(grid, best, linewidth=1, where="mid", **style)
        end = min(int(np.searchsorted(best, MOST_GAMMA)), len(grid) - 1)
        axes.annotate(f"c {c:g}", (grid[end], min(best[end], MOST_GAMMA)), fontsize=8)
    axes.plot(*points(runs, "optimal_gamma"), "o", color=MEASURED, label="gamma* of a run's alpha and c")
    axes.set(xlabel="alpha", ylabel="best gamma", ylim=(0, MOST_GAMMA + 1))


def operations(axes: Any, runs: Sequence[Run]) -> None:
    """Figure 4: speedup (solid) and operations (dashed) by alpha, for c = c_hat = 0 (Theorems 3.8 and 3.11)."""
    for gamma in (3, 5, 7, 10):
        speedup = [theory.walltime_improvement(alpha, gamma, 0) for alpha in ALPHAS]
        factor = [theory.operations_factor(alpha, gamma, 0) for alpha in ALPHAS]
        axes.plot(ALPHAS, speedup, color=THEORY, linewidth=1, label="speedup, c = 0")
        axes.plot(ALPHAS, factor, "--", color=OTHER, linewidth=1, label="operations, c_hat = 0")
        axes.annotate(f"gamma {gamma}", (1, speedup[-1]), fontsize=8, va="center")
    axes.plot(*points(runs, "speedup/measured"), "o", color=MEASURED, label="speedup, measured")
    axes.plot(*points(runs, "operations_factor"), "s", color=OTHER, label="operations of the runs")
    axes.set(xlabel="alpha", ylabel="times plain decoding's", xlim=(-0.05, 1.2))


def rounds_in_time(axes: Any, runs: Sequence[Run]) -> None:
    """Figures 1 and 5: the first rounds of a text in time, by stage, with plain decoding's steps below them."""
    colours = dict(zip(STAGES, ("#55a868", THEORY, "#8172b2", "#bbbbbb"), strict=True))
    labels: list[str] = []
    for run in runs:
        record = next(record for record in run.records if record.speculative and record.baseline)
        drafter, gamma = run.results["details"]["choices"]["drafter"], run.results["config"]["gamma"]
        for text, label in ((record.speculative, f"{drafter}, gamma {gamma}"), (record.baseline, "plain")):
            assert text is not None
            y, begin = len(labels), 0.0
            for number in range(min(12, len(text.rounds.tokens))):
                for stage in STAGES:
                    seconds = 1e3 * getattr(text.rounds, stage)[number]
                    axes.barh(y, seconds, left=begin, color=colours[stage], label=stage)
                    begin += seconds
                axes.text(begin, y + 0.42, str(text.rounds.tokens[number]), fontsize=6, ha="right", va="bottom")
            labels.append(label)
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set(xlabel="milliseconds of the first rounds; above each the tokens that it kept")


def predictions(name: str, axes: Any, runs: Sequence[Run]) -> None:
    """Speedups by Theorem 3.8: those printed in the table of this name, and ours."""
    printed = [(one.formula, float(one.text)) for one in PRINTED.get(name, list)() if one.formula is not None]
    speedups = [run.results["speedup"] for run in runs]
    ours = [(s["theorem_3_8"], s["measured"]) for s in speedups if s["theorem_3_8"] and s["measured"]]
    most = max((value for pair in (*printed, *ours) for value in pair), default=1.0)
    axes.plot([0, most], [0, most], ":", color=OTHER, linewidth=1)
    for pairs, mark, colour, label in ((printed, "D", THEORY, "printed"), (ours, "o", MEASURED, "ours")):
        if pairs:
            axes.plot(*zip(*pairs, strict=True), mark, color=colour, label=label)
    axes.set(xlabel="speedup by Theorem 3.8", ylabel="speedup")
