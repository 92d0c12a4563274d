"""The paper's Figures 2 to 4 and Table 1, computed by `theory.py`, with measured runs added."""

from collections.abc import Sequence

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from specbench import theory
from specbench.report.style import MEASURED, OTHER, SERIES
from specbench.storage.read import StoredRun

ALPHAS = np.linspace(0, 0.999, 200)
TABLE_1 = ((0.6, 2), (0.7, 3), (0.8, 2), (0.8, 5), (0.9, 2), (0.9, 10))


def _points(runs: Sequence[StoredRun]) -> list[StoredRun]:
    """The runs that have an alpha."""
    return [run for run in runs if run.result["alpha"]["mean"] is not None]


def figure_2(runs: Sequence[StoredRun]) -> Figure:
    """Figure 2: expected tokens per run of Algorithm 1, by alpha (equation 1)."""
    figure, axes = plt.subplots(figsize=(6, 4))
    for gamma, colour in zip((1, 3, 5, 7, 10), SERIES, strict=False):
        axes.plot(ALPHAS, [theory.expected_tokens(a, gamma) for a in ALPHAS], color=colour, label=f"gamma {gamma}")
    for run in _points(runs):
        axes.plot(run.result["alpha"]["mean"], run.result["block_efficiency"]["mean"], "o", color=MEASURED)
    axes.plot([], [], "o", color=MEASURED, label="measured")
    axes.set_xlabel("alpha")
    axes.set_ylabel("tokens a round")
    axes.grid()
    axes.legend(fontsize=8)
    return figure


def figure_3(runs: Sequence[StoredRun]) -> Figure:
    """Figure 3: the best gamma by alpha (section 3.5)."""
    figure, axes = plt.subplots(figsize=(6, 4))
    alphas = np.linspace(0.01, 0.95, 95)
    for c, colour in zip((0.01, 0.02, 0.05, 0.1, 0.2), SERIES, strict=False):
        best = [theory.optimal_gamma(a, c, largest=40) for a in alphas]
        axes.step(alphas, best, color=colour, where="mid", label=f"c = {c}")
    swept = [run.result for run in _points(runs) if run.result["gamma_sweep"]]
    if swept:
        best = [max(result["gamma_sweep"], key=lambda entry: entry["speedup"])["gamma"] for result in swept]
        axes.plot([result["alpha"]["mean"] for result in swept], best, "o", color=MEASURED, label="best by replay")
    axes.set_xlabel("alpha")
    axes.set_ylabel("best gamma")
    axes.set_ylim(0, 25)
    axes.grid()
    axes.legend(fontsize=8)
    return figure


def figure_4(runs: Sequence[StoredRun]) -> Figure:
    """Figure 4: speedup (solid) and operations (dashed) by alpha, for c = c_hat = 0 (Theorems 3.8 and 3.11)."""
    figure, axes = plt.subplots(figsize=(6, 4))
    for gamma, colour in zip((3, 5, 7, 10), SERIES, strict=False):
        axes.plot(
            ALPHAS, [theory.walltime_improvement(a, gamma, 0) for a in ALPHAS], color=colour, label=f"gamma {gamma}"
        )
        axes.plot(ALPHAS, [theory.operations_factor(a, gamma, 0) for a in ALPHAS], "--", color=colour)
    results = [run.result for run in _points(runs)]
    x = [result["alpha"]["mean"] for result in results]
    speedups = [result["speedup"]["measured"] for result in results]
    axes.plot(x, speedups, "o", color=MEASURED, label="speedup, measured (c above 0)")
    operations = [result["operations_factor"] for result in results]
    if any(factor is not None for factor in operations):
        axes.plot(x, [np.nan if f is None else f for f in operations], "s", color=OTHER, label="operations of the runs")
    axes.set_xlabel("alpha")
    axes.set_ylabel("speedup (solid), operations (dashed)")
    axes.grid()
    axes.legend(fontsize=8)
    return figure


def table_1(runs: Sequence[StoredRun]) -> list[dict[str, str]]:
    """Table 1: operations and speed by alpha and gamma for c = c_hat = 0, then the measured runs."""
    rows = [
        {
            "": "theory",
            "alpha": f"{alpha:.2f}",
            "gamma": str(gamma),
            "operations": f"{theory.operations_factor(alpha, gamma, 0):.2f}x",
            "speed": f"{theory.walltime_improvement(alpha, gamma, 0):.2f}x",
        }
        for alpha, gamma in TABLE_1
    ]
    for run in _points(runs):
        r = run.result
        operations = r["operations_factor"]
        rows.append(
            {
                "": run.label,
                "alpha": f"{r['alpha']['mean']:.2f}",
                "gamma": "varies" if r["gamma"] is None else str(r["gamma"]),
                "operations": "-" if operations is None else f"{operations:.2f}x",
                "speed": f"{r['speedup']['measured']:.2f}x",
            }
        )
    return rows
