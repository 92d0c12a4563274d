"""The paper's Figures 2 to 4 and Table 1, computed by `theory.py`, with measured runs added."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from specbench import theory
from specbench.results.reader import StoredRun
from specbench.results.report.style import HALF, MEASURED, OTHER, THEORY

ALPHAS = np.linspace(0, 0.999, 200)
TABLE_1 = ((0.6, 2), (0.7, 3), (0.8, 2), (0.8, 5), (0.9, 2), (0.9, 10))


def _points(runs: Sequence[StoredRun]) -> list[StoredRun]:
    """The runs that have an alpha."""
    return [run for run in runs if run.result["alpha"]["mean"] is not None]


def figure_2(runs: Sequence[StoredRun]) -> Figure:
    """Figure 2: expected tokens per run of Algorithm 1, by alpha (equation 1)."""
    figure, axes = plt.subplots(figsize=HALF)
    for gamma in (1, 3, 5, 7, 10):
        curve = [theory.expected_tokens(a, gamma) for a in ALPHAS]
        axes.plot(ALPHAS, curve, color=THEORY, linewidth=1)
        _name(axes, f"gamma {gamma}", ALPHAS[-1], curve[-1])
    for run in _points(runs):
        axes.plot(run.result["alpha"]["mean"], run.result["block_efficiency"]["mean"], "o", color=MEASURED)
    axes.plot([], [], color=THEORY, label="equation 1")
    axes.plot([], [], "o", color=MEASURED, label="measured")
    axes.set_xlabel("alpha")
    axes.set_xlim(-0.03, 1.22)
    axes.set_ylabel("tokens a round")
    return _finished(figure, axes)


def _name(axes: Any, name: str, x: float, y: float, aside: int = 4) -> None:
    """The name of a line beside its end."""
    axes.annotate(name, (x, y), (aside, 0), textcoords="offset points", va="center", fontsize=8, annotation_clip=False,
                  ha="left" if aside > 0 else "right")  # fmt: skip


def _finished(figure: Figure, axes: Any) -> Figure:
    axes.grid()
    axes.set_xticks(np.linspace(0, 1, 6))
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=2, fontsize=8)
    return figure


def figure_3(runs: Sequence[StoredRun]) -> Figure:
    """Figure 3: the best gamma by alpha (section 3.5)."""
    figure, axes = plt.subplots(figsize=HALF)
    alphas, most = np.linspace(0.01, 0.95, 95), 25
    for c in (0.01, 0.02, 0.05, 0.1, 0.2):
        best = [theory.optimal_gamma(a, c, largest=40) for a in alphas]
        axes.step(alphas, best, color=THEORY, linewidth=1, where="mid")
        end = next((number for number, gamma in enumerate(best) if gamma >= most), len(best) - 1)
        if best[end] < most:
            _name(axes, f"c {c:g}", alphas[end], best[end])
        else:
            side = "right" if c == 0.01 else "left"
            axes.annotate(f"c {c:g}", (alphas[end], most), (0, 3), textcoords="offset points", ha=side, fontsize=8)
    swept = [run.result for run in _points(runs) if run.result["gamma_sweep"]]
    axes.plot([], [], color=THEORY, label="gamma* of Theorem 3.8")
    if swept:
        best = [max(result["gamma_sweep"], key=lambda entry: entry["speedup"])["gamma"] for result in swept]
        axes.plot([result["alpha"]["mean"] for result in swept], best, "o", color=MEASURED, label="best by replay")
    axes.set_xlabel("alpha")
    axes.set_ylabel("best gamma")
    axes.set_ylim(0, most)
    axes.set_xlim(0, 1.12)
    return _finished(figure, axes)


def figure_4(runs: Sequence[StoredRun]) -> Figure:
    """Figure 4: speedup (solid) and operations (dashed) by alpha, for c = c_hat = 0 (Theorems 3.8 and 3.11)."""
    figure, axes = plt.subplots(figsize=HALF)
    for gamma in (3, 5, 7, 10):
        speedup = [theory.walltime_improvement(a, gamma, 0) for a in ALPHAS]
        operations = [theory.operations_factor(a, gamma, 0) for a in ALPHAS]
        axes.plot(ALPHAS, speedup, color=THEORY, linewidth=1)
        axes.plot(ALPHAS, operations, "--", color=OTHER, linewidth=1)
        _name(axes, f"gamma {gamma}", ALPHAS[-1], speedup[-1])
        _name(axes, str(gamma), ALPHAS[0], operations[0], aside=-4)
    axes.plot([], [], color=THEORY, label="speedup, c = 0")
    axes.plot([], [], "--", color=OTHER, label="operations, c_hat = 0")
    results = [run.result for run in _points(runs)]
    x = [result["alpha"]["mean"] for result in results]
    axes.plot(x, [r["speedup"]["measured"] for r in results], "o", color=MEASURED, label="speedup, measured")
    found = [np.nan if result["operations_factor"] is None else result["operations_factor"] for result in results]
    axes.plot(x, found, "s", color=OTHER, label="operations of the runs")
    axes.set_xlabel("alpha")
    axes.set_xlim(-0.09, 1.22)
    axes.set_ylabel("times plain decoding's")
    return _finished(figure, axes)


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
                "": run.label if len(runs) > 1 else "this run",
                "alpha": f"{r['alpha']['mean']:.2f}",
                "gamma": "varies" if r["gamma"] is None else str(r["gamma"]),
                "operations": "-" if operations is None else f"{operations:.2f}x",
                "speed": f"{r['speedup']['measured']:.2f}x",
            }
        )
    return rows
