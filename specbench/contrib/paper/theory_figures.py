"""The paper's Figures 2 to 4, computed by `theory.py`, with measured runs added."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from specbench import theory
from specbench.results.reader import StoredRun
from specbench.results.report.style import HALF, MEASURED, OTHER, THEORY, finish

ALPHAS = np.linspace(0, 0.999, 200)
MOST_GAMMA = 25  # of Figure 3


def _with_alpha(runs: Sequence[StoredRun]) -> tuple[list[dict[str, Any]], list[float]]:
    """The results of the runs that have an alpha, and their alphas."""
    found = [run.result for run in runs if run.result["alpha"]["mean"] is not None]
    return found, [result["alpha"]["mean"] for result in found]


def figure_2(runs: Sequence[StoredRun]) -> Figure:
    """Figure 2: expected tokens per run of Algorithm 1, by alpha (equation 1)."""
    figure, axes = plt.subplots(figsize=HALF)
    for gamma in (1, 3, 5, 7, 10):
        curve = [theory.expected_tokens(a, gamma) for a in ALPHAS]
        axes.plot(ALPHAS, curve, color=THEORY, linewidth=1, label="equation 1")
        _name(axes, f"gamma {gamma}", ALPHAS[-1], curve[-1])
    results, alphas = _with_alpha(runs)
    tokens = [result["block_efficiency"]["mean"] for result in results]
    axes.plot(alphas, tokens, "o", color=MEASURED, label="measured")
    axes.set(xlim=(-0.03, 1.22), xticks=np.linspace(0, 1, 6))
    return finish(figure, "alpha", "tokens a round", ncols=2)


def _name(axes: Any, name: str, x: float, y: float, aside: int = 4) -> None:
    """The name of a line beside its end."""
    axes.annotate(name, (x, y), (aside, 0), textcoords="offset points", va="center", fontsize=8, annotation_clip=False,
                  ha="left" if aside > 0 else "right")  # fmt: skip


def figure_3(runs: Sequence[StoredRun]) -> Figure:
    """Figure 3: the best gamma by alpha (section 3.5), for the paper's c and for the c of each run."""
    results, alphas = _with_alpha([run for run in runs if run.result["gamma_sweep"]])
    ours = sorted({round(c, 2) for run in runs if (c := run.result["cost"]["c"]) is not None})
    figure, axes = plt.subplots(figsize=HALF)
    for c in (0.01, 0.02, 0.05, 0.1, 0.2):
        _best_gamma(axes, c, color=THEORY, label="gamma* of Theorem 3.8")
    for c in ours:
        _best_gamma(axes, c, color=MEASURED, linestyle="--", label="gamma* at the c of a run")
    best = [max(result["gamma_sweep"], key=lambda entry: entry["speedup"])["gamma"] for result in results]
    if results:
        axes.plot(alphas, best, "o", color=MEASURED, label="best by replay")
    axes.set(xlim=(0, 1.12), xticks=np.linspace(0, 1, 6))
    return finish(figure, "alpha", "best gamma", low=0, high=MOST_GAMMA, ncols=2)


def _best_gamma(axes: Any, c: float, **looks: Any) -> None:
    """The curve of one c, with its name."""
    grid = np.linspace(0.01, 0.95, 95)
    best = [theory.optimal_gamma(a, c, largest=40) for a in grid]
    axes.step(grid, best, linewidth=1, where="mid", **looks)
    end = next((number for number, gamma in enumerate(best) if gamma >= MOST_GAMMA), len(best) - 1)
    if best[end] < MOST_GAMMA:
        _name(axes, f"c {c:g}", grid[end], best[end])
    else:
        axes.annotate(f"c {c:g}", (grid[end], MOST_GAMMA), (0, 3), textcoords="offset points", fontsize=8,
                      ha="right" if c == 0.01 else "left")  # fmt: skip


def figure_4(runs: Sequence[StoredRun]) -> Figure:
    """Figure 4: speedup (solid) and operations (dashed) by alpha, for c = c_hat = 0 (Theorems 3.8 and 3.11)."""
    figure, axes = plt.subplots(figsize=HALF)
    for gamma in (3, 5, 7, 10):
        speedup = [theory.walltime_improvement(a, gamma, 0) for a in ALPHAS]
        operations = [theory.operations_factor(a, gamma, 0) for a in ALPHAS]
        axes.plot(ALPHAS, speedup, color=THEORY, linewidth=1, label="speedup, c = 0")
        axes.plot(ALPHAS, operations, "--", color=OTHER, linewidth=1, label="operations, c_hat = 0")
        _name(axes, f"gamma {gamma}", ALPHAS[-1], speedup[-1])
        _name(axes, str(gamma), ALPHAS[0], operations[0], aside=-4)
    results, alphas = _with_alpha(runs)
    counted = [np.nan if result["operations_factor"] is None else result["operations_factor"] for result in results]
    axes.plot(alphas, [result["speedup"]["measured"] for result in results], "o", color=MEASURED,
              label="speedup, measured")  # fmt: skip
    axes.plot(alphas, counted, "s", color=OTHER, label="operations of the runs")
    axes.set(xlim=(-0.09, 1.22), xticks=np.linspace(0, 1, 6))
    return finish(figure, "alpha", "times plain decoding's", ncols=2)
