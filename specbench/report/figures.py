"""Figures of finished runs, as SVG for pages."""

import io
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from specbench.errors import visible
from specbench.report.files import Run
from specbench.report.tables import MEANING
from specbench.theory import walltime_improvement

INK = "#7a828c"  # of text and axes; a page puts its own colour of text in its place
THEORY, MEASURED, GAIN, LOSS = "#4c78a8", "#e07b39", "#3f9b6b", "#c8553d"
LINES = (MEASURED, THEORY, GAIN, "#8a63a8", LOSS, "#b58a1b", "#4aa3a2", INK)
WIDTH = 4.6  # inches
MOST_TICKS = 8  # beyond them matplotlib chooses
STYLE: Any = {  # matplotlib names each key in its types
    "font.size": 9,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "text.color": INK,
    "text.parse_math": False,  # a label is text, whatever it holds
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "svg.fonttype": "none",
    "svg.hashsalt": "specbench",
}


def svg(figure: Figure) -> str:
    """The figure as SVG text in the page's colour of text, without the XML header."""
    buffer = io.StringIO()
    with warnings.catch_warnings(), matplotlib.rc_context(STYLE):
        warnings.filterwarnings("ignore", "Glyph")  # a browser has fonts that matplotlib lacks
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :].replace(INK, "currentColor")


def canvas(rows: float) -> tuple[Figure, Any]:
    """A figure for so many horizontal bars, and its axes."""
    figure = Figure(figsize=(WIDTH, 0.9 + 0.34 * rows), layout="constrained")
    return figure, figure.subplots()


def legend(axes: Any, columns: int) -> None:
    """A legend above the axes, with each name once."""
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    place = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0)}
    axes.legend(unique.values(), unique.keys(), ncols=columns, columnspacing=1.2, handlelength=1.2, **place)


def name_rows(axes: Any, names: Sequence[str]) -> None:
    """Names from top to bottom; long ones are broken, and cut after two lines."""
    short = [textwrap.fill(visible(name), 34, max_lines=2, placeholder=" ...") for name in names]
    axes.set_yticks(range(len(names)), short)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)


def at_one(axes: Any) -> None:
    """A line where both methods are as fast."""
    axes.axvline(1, color=INK, linewidth=0.8, linestyle=":")
    axes.set_xlabel("speedup over plain decoding")


def over_gamma(run: Run) -> Figure | None:
    """Theorem 3.8's prediction over gamma by the run's alpha and c, and the measurement at the run's own gamma."""
    speedup, counts = run.results["speedup"], run.results["counts"]
    alpha, c, gamma = run.results["alpha"]["mean"], run.results["cost"]["c"], run.results["config"]["gamma"]
    if None in (alpha, c, speedup["measured"], speedup["theorem_3_8"]) or not counts["drafted"]:
        return None
    gammas = range(2 * gamma + 3)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 2.9), layout="constrained")
        axes = figure.subplots()
        predicted = [walltime_improvement(alpha, number, c) for number in gammas]
        axes.plot(gammas, predicted, ".--", color=THEORY, label=f"Theorem 3.8 at alpha {alpha:.2f}, c {c:.2f}")
        axes.plot(gamma, speedup["measured"], "o", color=MEASURED, label="measured, 95 % interval")
        axes.plot((gamma, gamma), speedup["ci95"] or (speedup["measured"],) * 2, color=MEASURED, linewidth=2)
        axes.axhline(1, color=INK, linewidth=0.8, linestyle=":")
        axes.set(xlabel="gamma", ylabel="speedup over plain decoding")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        legend(axes, 1)
    return figure


def accounting(run: Run) -> Figure | None:
    """The factors of the speedup as bars from one to the next, from Theorem 3.8's prediction to the measurement."""
    speedup = run.results["speedup"]
    factors = [entry for entry in speedup["accounting"] if entry["factor"] != "rows" or abs(entry["value"] - 1) > 1e-3]
    if not factors or speedup["measured"] is None:
        return None
    with matplotlib.rc_context(STYLE):
        figure, axes = canvas(len(factors) + 1)
        level = 1.0
        for y, entry in enumerate(factors):
            after = level * entry["value"]
            colour = THEORY if y == 0 else GAIN if after >= level else LOSS
            axes.barh(y, after - level, left=level, color=colour, height=0.6)
            axes.plot((after, after), (y + 0.3, y + 0.7), color=INK, linewidth=0.8)
            value = f"x{entry['value']:.2f}" if y else f"{after:.2f}"
            annotate_behind(axes, value, max(after, level), y)
            level = after
        last, ends = len(factors), speedup["ci95"] or (level, level)
        axes.barh(last, level - 1, left=1, color=MEASURED, height=0.6)
        axes.plot(ends, (last, last), color=INK, linewidth=1.6)
        annotate_behind(axes, f"{speedup['measured']:.2f}", max(level, 1, ends[1]), last)
        name_rows(axes, [*(MEANING.get(entry["factor"], entry["factor"]) for entry in factors), "measured"])
        axes.margins(x=0.14)
        at_one(axes)
    return figure


def annotate_behind(axes: Any, text: str, x: float, y: float) -> None:
    """A value behind the end of a bar."""
    axes.annotate(text, (x, y), xytext=(5, 0), textcoords="offset points", va="center")


def speedups(rows: Sequence[tuple[str, float | None, Sequence[float] | None, float | None]]) -> Figure:
    """Rows of a name, a measured speedup, its interval, and Theorem 3.8's prediction."""
    with matplotlib.rc_context(STYLE):
        figure, axes = canvas(len(rows))
        for y, (_, measured, ends, predicted) in enumerate(rows):
            if measured is not None:
                axes.plot(measured, y, "o", color=MEASURED, label="measured, 95 % interval")
                axes.plot(ends or (measured, measured), (y, y), linewidth=2, color=MEASURED)
            if predicted is not None:
                axes.plot(predicted, y, "D", color=THEORY, markerfacecolor="none", label="Theorem 3.8")
        name_rows(axes, [row[0] for row in rows])
        legend(axes, 2)
        at_one(axes)
    return figure


def sweep_lines(runs: Sequence[Run]) -> Figure | None:
    """The speedup over the override that has the most numbers, a line for each setting of the others, and Theorem 3.8's
    predictions dashed; None if no override has three numbers."""
    settings = [overrides(run) for run in runs]
    key = swept_number(settings)
    if key is None:
        return None
    lines: dict[str, list[tuple[float, Mapping[str, Any]]]] = {}
    common = set.intersection(*(set(own.items()) for own in settings))
    for run, own in zip(runs, settings, strict=True):
        if run.results["speedup"]["measured"] is not None:
            rest = [f"{name}={value}" for name, value in own.items() if name != key and (name, value) not in common]
            lines.setdefault(", ".join(rest), []).append((float(own[key]), run.results["speedup"]))
    if not 0 < len(lines) <= len(LINES):
        return None
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 3), layout="constrained")
        axes = figure.subplots()
        for colour, (name, points) in zip(LINES, sorted(lines.items()), strict=False):
            draw_line(axes, sorted(points, key=lambda point: point[0]), colour, visible(name) or "measured")
        axes.axhline(1, color=INK, linewidth=0.8, linestyle=":")
        axes.set(xlabel=key, ylabel="speedup over plain decoding")
        values = sorted({float(own[key]) for own in settings})
        if len(values) <= MOST_TICKS:
            axes.set_xticks(values, [f"{value:g}" for value in values])
        axes.plot([], [], "--", color=INK, label="Theorem 3.8")
        legend(axes, 2)
    return figure


def draw_line(axes: Any, points: Sequence[tuple[float, Mapping[str, Any]]], colour: str, name: str) -> None:
    """Speedups by a number, with intervals, and their predictions."""
    at, measured = [x for x, _ in points], [speedup["measured"] for _, speedup in points]
    axes.plot(at, measured, "o-", color=colour, label=name)
    for x, speedup in points:
        axes.plot((x, x), speedup["ci95"] or (speedup["measured"],) * 2, color=colour, linewidth=1.2, alpha=0.6)
    predicted = [float("nan") if speedup["theorem_3_8"] is None else speedup["theorem_3_8"] for _, speedup in points]
    axes.plot(at, predicted, "--", color=colour, linewidth=1)


def overrides(run: Run) -> dict[str, str]:
    """The overrides of a run, by key."""
    return {key: value for key, _, value in (word.partition("=") for word in run.results["details"]["overrides"])}


def swept_number(settings: Sequence[Mapping[str, str]]) -> str | None:
    """The key that all runs set to finite numbers, with the most of them; None if none has three."""
    numbers = pd.DataFrame(settings).apply(pd.to_numeric, errors="coerce").replace([np.inf, -np.inf], np.nan)
    counts = numbers.dropna(axis="columns").nunique()
    return str(counts.idxmax()) if (counts >= 3).any() else None
