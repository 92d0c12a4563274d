"""The paper's Figures 2 to 4 and Table 1, computed by `theory.py`, with measured runs added."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from specbench import theory
from specbench.results.reader import StoredRun
from specbench.results.report.style import HALF, MEASURED, OTHER, THEORY

ALPHAS = np.linspace(0, 0.999, 200)
TABLE_1 = ((0.6, 2), (0.7, 3), (0.8, 2), (0.8, 5), (0.9, 2), (0.9, 10))
MOST_GAMMA = 25  # of Figure 3


def _with_alpha(runs: Sequence[StoredRun]) -> list[Mapping[str, Any]]:
    """The results of the runs that have an alpha."""
    return [run.result for run in runs if run.result["alpha"]["mean"] is not None]


def _alphas(results: Sequence[Mapping[str, Any]]) -> list[float]:
    return [result["alpha"]["mean"] for result in results]


def figure_2(runs: Sequence[StoredRun]) -> Figure:
    """Figure 2: expected tokens per run of Algorithm 1, by alpha (equation 1)."""
    figure, axes = plt.subplots(figsize=HALF)
    for gamma in (1, 3, 5, 7, 10):
        curve = [theory.expected_tokens(a, gamma) for a in ALPHAS]
        axes.plot(ALPHAS, curve, color=THEORY, linewidth=1, label="equation 1" if gamma == 1 else None)
        _name(axes, f"gamma {gamma}", ALPHAS[-1], curve[-1])
    results = _with_alpha(runs)
    tokens = [result["block_efficiency"]["mean"] for result in results]
    axes.plot(_alphas(results), tokens, "o", color=MEASURED, label="measured")
    axes.set(xlim=(-0.03, 1.22), ylabel="tokens a round")
    return _finished(figure, axes)


def _name(axes: Any, name: str, x: float, y: float, aside: int = 4) -> None:
    """The name of a line beside its end."""
    axes.annotate(name, (x, y), (aside, 0), textcoords="offset points", va="center", fontsize=8, annotation_clip=False,
                  ha="left" if aside > 0 else "right")  # fmt: skip


def _finished(figure: Figure, axes: Any) -> Figure:
    axes.grid()
    axes.set(xlabel="alpha", xticks=np.linspace(0, 1, 6))
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=2, fontsize=8)
    return figure


def figure_3(runs: Sequence[StoredRun]) -> Figure:
    """Figure 3: the best gamma by alpha (section 3.5)."""
    figure, axes = plt.subplots(figsize=HALF)
    alphas = np.linspace(0.01, 0.95, 95)
    for c in (0.01, 0.02, 0.05, 0.1, 0.2):
        best = [theory.optimal_gamma(a, c, largest=40) for a in alphas]
        label = "gamma* of Theorem 3.8" if c == 0.01 else None
        axes.step(alphas, best, color=THEORY, linewidth=1, where="mid", label=label)
        end = next((number for number, gamma in enumerate(best) if gamma >= MOST_GAMMA), len(best) - 1)
        if best[end] < MOST_GAMMA:
            _name(axes, f"c {c:g}", alphas[end], best[end])
        else:
            side = "right" if c == 0.01 else "left"
            place = (alphas[end], MOST_GAMMA)
            axes.annotate(f"c {c:g}", place, (0, 3), textcoords="offset points", ha=side, fontsize=8)
    if swept := [result for result in _with_alpha(runs) if result["gamma_sweep"]]:
        best = [max(result["gamma_sweep"], key=lambda entry: entry["speedup"])["gamma"] for result in swept]
        axes.plot(_alphas(swept), best, "o", color=MEASURED, label="best by replay")
    axes.set(ylabel="best gamma", ylim=(0, MOST_GAMMA), xlim=(0, 1.12))
    return _finished(figure, axes)


def figure_4(runs: Sequence[StoredRun]) -> Figure:
    """Figure 4: speedup (solid) and operations (dashed) by alpha, for c = c_hat = 0 (Theorems 3.8 and 3.11)."""
    figure, axes = plt.subplots(figsize=HALF)
    for gamma in (3, 5, 7, 10):
        speedup = [theory.walltime_improvement(a, gamma, 0) for a in ALPHAS]
        operations = [theory.operations_factor(a, gamma, 0) for a in ALPHAS]
        labels = ("speedup, c = 0", "operations, c_hat = 0") if gamma == 3 else (None, None)
        axes.plot(ALPHAS, speedup, color=THEORY, linewidth=1, label=labels[0])
        axes.plot(ALPHAS, operations, "--", color=OTHER, linewidth=1, label=labels[1])
        _name(axes, f"gamma {gamma}", ALPHAS[-1], speedup[-1])
        _name(axes, str(gamma), ALPHAS[0], operations[0], aside=-4)
    results = _with_alpha(runs)
    speeds = [result["speedup"]["measured"] for result in results]
    found = [np.nan if result["operations_factor"] is None else result["operations_factor"] for result in results]
    axes.plot(_alphas(results), speeds, "o", color=MEASURED, label="speedup, measured")
    axes.plot(_alphas(results), found, "s", color=OTHER, label="operations of the runs")
    axes.set(xlim=(-0.09, 1.22), ylabel="times plain decoding's")
    return _finished(figure, axes)


def table_1(runs: Sequence[StoredRun]) -> list[dict[str, str]]:
    """Table 1: operations and speed by alpha and gamma for c = c_hat = 0, then the measured runs."""
    rows = [
        _row("theory", a, gamma, theory.operations_factor(a, gamma, 0), theory.walltime_improvement(a, gamma, 0))
        for a, gamma in TABLE_1
    ]
    for run in runs:
        r, label = run.result, run.label if len(runs) > 1 else "this run"
        if r["alpha"]["mean"] is not None:
            rows.append(_row(label, r["alpha"]["mean"], r["gamma"], r["operations_factor"], r["speedup"]["measured"]))
    return rows


def _row(name: str, alpha: float, gamma: int | None, operations: float | None, speed: float) -> dict[str, str]:
    return {
        "": name,
        "alpha": f"{alpha:.2f}",
        "gamma": "varies" if gamma is None else str(gamma),
        "operations": "-" if operations is None else f"{operations:.2f}x",
        "speed": f"{speed:.2f}x",
    }
