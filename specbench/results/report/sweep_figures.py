"""Small multiples of many runs: a panel for each setting, instead of many lines in one plot."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from specbench.errors import visible
from specbench.results.fields import at
from specbench.results.reader import StoredRun
from specbench.results.report.figures import draw_beta, draw_by_gamma
from specbench.results.report.style import MEASURED, THEORY
from specbench.results.wording import label

NIGHT = "#111111"  # text on a light cell, in a dark page too; black itself would become the page's text colour
MOST = 12  # panels of a figure
COLUMNS = 3
RunGroups = Mapping[str, Sequence[StoredRun]]


def group_runs(runs: Sequence[StoredRun], but: Sequence[str]) -> dict[str, list[StoredRun]]:
    """The runs by their settings in all swept keys but these, in words."""
    found: dict[str, list[StoredRun]] = {}
    for run in runs:
        name = label({key: value for key, value in run.keys.items() if key not in but})
        found.setdefault(visible(name), []).append(run)
    return found


def _grid(groups: RunGroups, height: float, **shared: Any) -> tuple[Figure, list[tuple[str, Sequence[StoredRun], Any]]]:
    """A figure and its panels: title, runs and axes of each."""
    shown = list(groups.items())[:MOST]
    columns = min(COLUMNS, len(shown))
    rows = -(-len(shown) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(max(5.0, 3.1 * columns), 0.7 + height * rows), squeeze=False,
                                **shared)  # fmt: skip
    for empty in axes.flat[len(shown) :]:
        empty.set_visible(False)
    found = [(name, runs, panel) for (name, runs), panel in zip(shown, axes.flat, strict=False)]
    for name, _, panel in found:
        panel.set_title(textwrap.fill(name, 38), fontsize=9)
    return figure, found


def gamma_panels(groups: RunGroups) -> Figure:
    """Speedup by gamma, in each panel: replay and Theorem 3.8 as a line for each run, measured runs as points."""
    figure, panels = _grid(groups, 2.3, sharex=True, sharey=True)
    every = [entry["gamma"] for runs in groups.values() for run in runs for entry in run.result["gamma_sweep"]]
    for _, runs, axes in panels:
        for run in runs:
            draw_by_gamma(axes, run, np.arange(max(every, default=8) + 2), alone=False)
    panels[0][2].set_ylim(bottom=0)  # of all, once everything is drawn
    figure.supxlabel("gamma, tokens drafted a round", fontsize=10)
    figure.supylabel("speedup over plain decoding", fontsize=10)
    handles = [
        Line2D([], [], color=MEASURED, marker="o", linestyle="", label="measured, 95 % interval"),
        Line2D([], [], color=MEASURED, linewidth=1, label="replay of a run"),
        Line2D([], [], color=THEORY, linestyle="--", linewidth=1, label="Theorem 3.8"),
    ]
    figure.legend(handles=handles, loc="outside upper left", ncols=3, fontsize=9)
    return figure


def beta_panels(groups: RunGroups) -> Figure:
    """Mean beta by the place of the guess in its round, in each panel, with a line for each run."""
    figure, panels = _grid(groups, 2.1, sharex=True, sharey=True)
    for _, runs, axes in panels:
        for run in runs:
            draw_beta(axes, run, markersize=4)
    figure.supxlabel("place of the guess in its round", fontsize=10)
    figure.supylabel("mean beta", fontsize=10)
    return figure


def largest_cell(runs: Sequence[StoredRun], x: str, y: str) -> int:
    """The most runs that share a cell of a map over two keys."""
    cells = [(run.keys.get(x), run.keys.get(y)) for run in runs]
    return max(cells.count(cell) for cell in cells)


def heat_maps(runs: Sequence[StoredRun], x: str, y: str, value: str, title: str) -> Figure:
    """A number of the results, a path like "speedup/measured", over two swept keys, with a map for each setting of the
    others. A cell of several runs with the same settings has their mean, and says of how many."""
    columns, rows = (list(dict.fromkeys(run.keys.get(key, "-") for run in runs)) for key in (x, y))
    shown = list(group_runs(runs, (x, y)).items())[:MOST]
    across = min(len(shown), max(1, int(9 / (1.6 + 0.85 * len(columns)))))
    down = -(-len(shown) // across)
    size = (2.2 + (0.5 + 0.85 * len(columns)) * across, 1.0 + (0.8 + 0.45 * len(rows)) * down)
    figure, axes = plt.subplots(down, across, figsize=size, squeeze=False)
    numbers = [found for run in runs if (found := at(run.result, value)) is not None]
    low, high = min(numbers, default=0.0), max(numbers, default=1.0)
    for empty in axes.flat[len(shown) :]:
        empty.set_visible(False)
    for (name, group), panel in zip(shown, axes.flat, strict=False):
        image = _heat_map(panel, group, (x, y), (columns, rows), value, (low, high))
        panel.set_title(textwrap.fill(name, 38), fontsize=9)
        panel.set_xlabel(visible(x))
        panel.set_ylabel(visible(y))
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.colorbar(image, ax=axes)
    return figure


def _heat_map(axes: Any, runs: Sequence[StoredRun], keys: tuple[str, str], places: tuple[list[str], list[str]],
              value: str, ends: tuple[float, float]) -> Any:  # fmt: skip
    """Draws one map; returns its image."""
    columns, rows = places
    cells: dict[tuple[int, int], list[float]] = {}
    for run in runs:
        if (found := at(run.result, value)) is not None:
            place = rows.index(run.keys.get(keys[1], "-")), columns.index(run.keys.get(keys[0], "-"))
            cells.setdefault(place, []).append(found)
    grid = np.full((len(rows), len(columns)), np.nan)
    for place, values in cells.items():
        grid[place] = np.mean(values)
    image = axes.imshow(grid, cmap="cividis", aspect="auto", vmin=ends[0], vmax=ends[1])
    for (row, column), values in cells.items():
        colour = "white" if grid[row, column] <= sum(ends) / 2 else NIGHT
        told = f"{grid[row, column]:.2f}" + (f"\nn {len(values)}" if len(values) > 1 else "")
        axes.text(column, row, told, ha="center", va="center", color=colour)
    axes.set_xticks(range(len(columns)), map(visible, columns))
    axes.set_yticks(range(len(rows)), map(visible, rows))
    return image
