"""Figures with a panel for each setting of runs, instead of many lines in one plot."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from specbench import theory
from specbench.errors import visible
from specbench.results.fields import at
from specbench.results.reader import StoredRun
from specbench.results.report.style import (
    GOOD,
    MARKERS,
    MEASURED,
    OTHER,
    SERIES,
    THEORY,
    draw_estimates,
    draw_panels,
    draw_value,
    finish,
)
from specbench.results.wording import label

LEAST_RANGE = 0.2  # of the colours of a map: numbers that hardly differ look alike
NIGHT = "#111111"  # text on a light cell, in a dark page too; black itself would become the page's text colour
OF_LENIENCE = {"alpha": "alpha/mean", "speedup": "speedup/measured", "drift: total variation": "drift/tv"}
ALONE = {"across": 1, "width": 8, "height": 3.2}  # of a figure with one panel
RunGroups = Mapping[str, Sequence[StoredRun]]


def group_runs(runs: Sequence[StoredRun], but: Sequence[str]) -> dict[str, list[StoredRun]]:
    """The runs by their settings in all swept keys but these, in words."""
    found: dict[str, list[StoredRun]] = {}
    for run in runs:
        name = label({key: value for key, value in run.keys.items() if key not in but})
        found.setdefault(visible(name), []).append(run)
    return found


def _of_settings(groups: RunGroups) -> tuple[Figure, list[tuple[Any, Any]]]:
    """A panel for each group of runs; all have the same axes."""
    size: dict[str, Any] = ALONE if len(groups) == 1 else {"width": 3.1, "height": 2.3}
    return draw_panels(groups, **size, sharex=True, sharey=True)


def speedup_by_gamma(groups: RunGroups) -> Figure:
    """Speedup by gamma, in each panel: replay and Theorem 3.8 as lines for each run, and the run as a point at its
    gamma, or at the mean of gammas that a policy varied. Of a run alone with the interval of replay and the best gamma
    of each line."""
    figure, panels = _of_settings(groups)
    runs = [run for group in groups.values() for run in group]
    last = max((entry["gamma"] for run in runs for entry in run.result["gamma_sweep"]), default=8)
    for group, axes in panels:
        for run in group:
            _draw_prediction(axes, run, np.arange(last + 2), len(runs) == 1)
            _draw_replay(axes, run.result["gamma_sweep"], len(runs) == 1)
            counts, gamma, speedup = run.result["counts"], run.result["gamma"], run.result["speedup"]
            gamma = counts["drafted"] / counts["rounds"] if gamma is None else gamma
            draw_value(axes, speedup["measured"], speedup["ci95"], x=gamma, fmt="o", color=MEASURED,
                       label="measured, 95 % interval")  # fmt: skip
        axes.axhline(1, color=OTHER, linewidth=1, linestyle=":")
    return finish(figure, "gamma, tokens drafted a round", "speedup over plain decoding", low=0, whole=True, ncols=5)


def _draw_prediction(axes: Any, run: StoredRun, gammas: Any, alone: bool) -> None:
    """Theorem 3.8 at these gammas."""
    alpha, c = run.result["alpha"]["mean"], run.result["cost"]["c"]
    if alpha is None or c is None:
        return
    curve = [theory.walltime_improvement(alpha, gamma, c) for gamma in gammas]
    axes.plot(gammas, curve, "--", color=THEORY, linewidth=1, label="Theorem 3.8")
    if alone:
        best = int(np.argmax(curve))
        axes.plot(best, curve[best], "*", color=THEORY, markersize=12, label="gamma* of Theorem 3.8")


def _draw_replay(axes: Any, sweep: Sequence[Mapping[str, Any]], alone: bool) -> None:
    """What replay expects of each gamma that has an interval; no line leads over one that has none."""
    y = [entry["speedup"] if entry["ci95"] else np.nan for entry in sweep]  # else it cannot be estimated
    if np.isnan(y).all():
        return
    x = [entry["gamma"] for entry in sweep]
    axes.plot(x, y, color=MEASURED, linewidth=1.5 if alone else 1, label="replay of a run")
    if alone:
        low, high = np.array([entry["ci95"] or [np.nan] * 2 for entry in sweep]).T
        axes.fill_between(x, low, high, color=MEASURED, alpha=0.15, linewidth=0)
        best = int(np.nanargmax(y))
        if x[best] > 0:  # 0 is plain decoding
            axes.plot(x[best], y[best], "s", color=MEASURED, markersize=9, mfc="none", label="best by replay")


def beta_by_position(groups: RunGroups) -> Figure:
    """Mean beta by the place of the guess in its round, in each panel, with a line for each run; beside a run alone its
    alphas."""
    figure, panels = _of_settings(groups)
    for group, axes in panels:
        for run in group:
            betas, told = run.result["beta_by_position"], "tested positions, +- 1.96 standard errors"
            draw_estimates(axes, range(1, len(betas) + 1), betas, "o-", MEASURED, told)
    if len(panels) == len(panels[0][0]) == 1:
        result = panels[0][0][0].result
        for alpha, colour, dashes, name in (
            (result["alpha"]["mean"], THEORY, "--", "alpha"),
            (result["alpha_on_target_text"]["mean"], GOOD, "-.", "alpha on the target's own text"),
        ):
            if alpha is not None:
                panels[0][1].axhline(alpha, color=colour, linestyle=dashes, linewidth=1, label=name)
    return finish(figure, "place of the guess in its round", "mean beta", low=0, high=1.02, whole=True, grid="y")


def lenience_figure(runs: Sequence[StoredRun]) -> Figure:
    """Alpha, speedup and drift by lenience (A.5), with a line for each setting of the other swept keys."""
    figure, panels = draw_panels(OF_LENIENCE, 3.2, 3)
    lines = zip(group_runs(runs, ("lenience",)).items(), SERIES, MARKERS, strict=False)  # as many as colours
    ticks = sorted({run.result["config"]["lenience"] for run in runs})
    for (name, group), colour, marker in lines:
        results = sorted((run.result for run in group), key=lambda result: result["config"]["lenience"])
        x = [result["config"]["lenience"] for result in results]
        for path, axes in panels:
            axes.plot(x, [at(result, path) for result in results], marker=marker, color=colour, label=name)
    for _, axes in panels:
        axes.set_xscale("log")
        axes.set_xticks(ticks, [f"{value:g}" for value in ticks])
        axes.minorticks_off()
    return finish(figure, "lenience l", low=0, ncols=3)


def heat_maps(runs: Sequence[StoredRun], x: str, y: str, value: str, title: str) -> Figure:
    """A number of the results, a path like "speedup/measured", over two swept keys, with a map for each setting of the
    others. A cell of several runs with the same settings has their mean, and says of how many."""
    columns, rows = (list(dict.fromkeys(run.keys.get(key, "-") for run in runs)) for key in (x, y))
    width = 0.5 + 0.85 * len(columns)
    figure, panels = draw_panels(
        group_runs(runs, (x, y)), width, 0.8 + 0.45 * len(rows), max(1, int(9 / (width + 1.1)))
    )
    numbers = [found for run in runs if (found := at(run.result, value)) is not None]
    low, high = min(numbers, default=0.0), max(numbers, default=1.0)
    if (lack := LEAST_RANGE - (high - low)) > 0:
        low, high = low - lack / 2, high + lack / 2
    for group, axes in panels:
        cells: dict[tuple[int, int], list[float]] = {}
        for run in group:
            if (found := at(run.result, value)) is not None:
                place = rows.index(run.keys.get(y, "-")), columns.index(run.keys.get(x, "-"))
                cells.setdefault(place, []).append(found)
        grid = np.full((len(rows), len(columns)), np.nan)
        for (row, column), values in cells.items():
            mean = grid[row, column] = np.mean(values)
            told = f"{mean:.2f}" + (f"\nn {len(values)}" if len(values) > 1 else "")
            colour = "white" if mean <= (low + high) / 2 else NIGHT
            axes.text(column, row, told, ha="center", va="center", color=colour)
        image = axes.imshow(grid, cmap="cividis", aspect="auto", vmin=low, vmax=high)
        axes.set_xticks(range(len(columns)), map(visible, columns))
        axes.set_yticks(range(len(rows)), map(visible, rows))
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    finish(figure, visible(x), visible(y), grid="")
    figure.colorbar(image, ax=[axes for _, axes in panels])
    return figure
