"""Figures of finished runs, as SVG for pages and as images for W&B."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from specbench.errors import visible
from specbench.measure.record import Record
from specbench.report.files import Run
from specbench.report.tables import MEANING

INK = "#7a828c"  # readable on white and on black
THEORY, MEASURED, GAIN, LOSS = "#4c78a8", "#e07b39", "#3f9b6b", "#c8553d"
PHASES = {"draft": "#e07b39", "verify": "#4c78a8", "accept": "#8a63a8", "host": "#a8adb3"}
FIRST_ROUNDS = 12  # of a text, in its timeline
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "svg.fonttype": "none",
}


def svg(figure: Figure) -> str:
    """The figure as SVG text, without the XML header."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True)
    plt.close(figure)
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def canvas(rows: int, width: float = 5.2) -> tuple[Figure, Any]:
    """Axes for so many horizontal bars."""
    return plt.subplots(figsize=(width, 0.9 + 0.34 * rows), layout="constrained")


def accounting(run: Run) -> Figure | None:
    """The factors of the speedup as bars from one to the next: from Theorem 3.8's prediction to the measurement."""
    factors = run.results["speedup"]["accounting"]
    if not factors:
        return None
    with plt.rc_context(STYLE):
        figure, axes = canvas(len(factors) + 1)
        level, names = 1.0, []
        for y, entry in enumerate(factors):
            after = level * entry["value"]
            colour = THEORY if y == 0 else GAIN if after >= level else LOSS
            axes.barh(y, after - level, left=level, color=colour, height=0.62)
            axes.annotate(f"x{entry['value']:.2f}", (max(after, level), y), xytext=(4, 0), va="center",
                          textcoords="offset points")  # fmt: skip
            names.append(MEANING.get(entry["factor"], entry["factor"]))
            level = after
        speedup = run.results["speedup"]
        _interval(axes, speedup["measured"], speedup["ci95"], len(factors))
        axes.annotate(f"{speedup['measured']:.2f}x", (max(level, (speedup["ci95"] or [level])[-1]), len(factors)),
                      xytext=(6, 0), textcoords="offset points", va="center")  # fmt: skip
        axes.set_yticks(range(len(names) + 1), [*names, "measured"])
        axes.invert_yaxis()
        axes.axvline(1, color=INK, linewidth=0.8, linestyle=":")
        axes.margins(x=0.14)
        axes.set_xlabel("speedup over plain decoding")
    return figure


def _interval(axes: Any, value: float | None, ends: Sequence[float] | None, y: float, colour: str = MEASURED) -> None:
    """A value with its 95 % interval."""
    if value is not None:
        axes.plot(value, y, "o", color=colour)
        axes.plot(ends or (value, value), (y, y), color=colour, linewidth=2)


def acceptance(run: Run) -> Figure | None:
    """beta at each place of the draft, and how many rounds accepted so many guesses."""
    found = run.results["acceptance"]
    if not found["by_place"]:
        return None
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(6.4, 2.6), layout="constrained")
        places = [entry["place"] for entry in found["by_place"]]
        errors = [1.96 * (entry["stderr"] or 0) for entry in found["by_place"]]
        left.errorbar(places, [entry["mean"] for entry in found["by_place"]], errors, fmt="o-", color=MEASURED)
        if run.results["alpha"]["mean"] is not None:
            left.axhline(run.results["alpha"]["mean"], color=THEORY, linewidth=1, linestyle="--", label="alpha")
            left.legend()
        left.set(xlabel="place in the draft", ylabel="mean of beta", ylim=(0, 1), xticks=places)
        right.bar(range(len(found["lengths"])), found["lengths"], color=MEASURED, width=0.7)
        right.set(xlabel="guesses accepted", ylabel="rounds", xticks=range(len(found["lengths"])))
    return figure


def timeline(records: Sequence[Record]) -> Figure | None:
    """The first rounds of a text in time, speculative above plain: which phase took how long, and what it kept."""
    record = next((one for one in records if one.speculative and one.baseline), None)
    if record is None or record.speculative is None or record.baseline is None:
        return None
    with plt.rc_context(STYLE):
        figure, axes = canvas(2, width=6.4)
        span = 0.0
        for y, text in enumerate((record.speculative.rounds, record.baseline.rounds)):
            begin = 0.0
            for number in range(min(FIRST_ROUNDS, len(text))):
                for phase, colour in PHASES.items():
                    seconds = 1e3 * getattr(text, phase)[number]
                    axes.barh(y, seconds, left=begin, color=colour, height=0.5, label=phase)
                    begin += seconds
                axes.annotate(str(text.tokens[number]), (begin, y - 0.28), ha="right", fontsize=7)
                axes.plot((begin, begin), (y - 0.25, y + 0.25), color=INK, linewidth=0.8)
            span = begin if y == 0 else span
        axes.set_yticks((0, 1), ("speculative", "plain"))
        axes.invert_yaxis()
        handles, labels = axes.get_legend_handles_labels()
        unique = dict(zip(labels, handles, strict=True))
        axes.legend(unique.values(), unique.keys(), ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.02))
        axes.set_xlabel(f"ms of the first {FIRST_ROUNDS} rounds of a text; above each the tokens that it kept")
    return figure


def speedups(runs: Sequence[Run]) -> Figure:
    """The speedup of each run with its interval, beside Theorem 3.8's prediction."""
    with plt.rc_context(STYLE):
        figure, axes = canvas(len(runs))
        for y, run in enumerate(runs):
            speedup = run.results["speedup"]
            _interval(axes, speedup["measured"], speedup["ci95"], y)
            if speedup["theorem_3_8"] is not None:
                axes.plot(speedup["theorem_3_8"], y, "D", color=THEORY, markerfacecolor="none")
        _named(axes, [run.label for run in runs])
        axes.plot([], [], "o", color=MEASURED, label="measured, 95 % interval")
        axes.plot([], [], "D", color=THEORY, markerfacecolor="none", label="Theorem 3.8")
        axes.legend(ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return figure


def ranking(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """The speedup of each compared method over plain decoding, the fastest first."""
    with plt.rc_context(STYLE):
        figure, axes = canvas(len(rows))
        for y, row in enumerate(rows):
            _interval(axes, row["speedup"], row["speedup_ci95"], y, GAIN if row["rank"] == 1 else INK)
        _named(axes, [row["method"] for row in rows])
    return figure


def _named(axes: Any, names: Sequence[str]) -> None:
    """Names from top to bottom, and a line at 1."""
    axes.set_yticks(range(len(names)), [visible(name.replace("$", "\\$")) for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.axvline(1, color=INK, linewidth=0.8, linestyle=":")
    axes.set_xlabel("speedup over plain decoding")
