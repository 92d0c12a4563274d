"""Figures of measured runs: each function takes stored runs, a comparison, or `acceptance` of results.json."""

import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from specbench.errors import visible
from specbench.results.comparison_tables import ComparisonDict
from specbench.results.fields import FACTORS, UNITS, ResultDict
from specbench.results.reader import StoredRun
from specbench.results.report.style import (
    BAD,
    GOOD,
    HALF,
    HATCHES,
    LAPS,
    MEASURED,
    OTHER,
    THEORY,
    draw_estimates,
    draw_rows,
    draw_value,
    finish,
)
from specbench.results.wording import within
from specbench.stats.comparison import LEVEL

PHONE = 3.9  # inches of a figure that a page of 400 pixels shows whole
MOST_CALLS = 8  # of a text, in its timeline
LAP_NAMES = {"draft": "drafting", "verify": "the target's call", "accept": "accepting", "host": "the host"}


def predicted_and_measured(runs: Sequence[StoredRun]) -> Figure:
    """Speedup of every run: measured with its interval, and predicted by Theorem 3.8."""
    figure, axes = draw_rows([run.label for run in runs])
    speedups = [run.result["speedup"] for run in runs]
    predicted = [np.nan if s["theorem_3_8"] is None else s["theorem_3_8"] for s in speedups]
    looks: dict[str, Any] = {"color": THEORY, "markersize": 7, "mew": 1.5, "mfc": "none", "label": "Theorem 3.8"}
    axes.plot(predicted, range(len(runs)), "D", **looks)
    for y, s in enumerate(speedups):
        draw_value(axes, s["measured"], s["ci95"], y=y, fmt="o", color=MEASURED, label="measured, 95 % interval")
    axes.axvline(1, color=OTHER, linewidth=1, linestyle=":")
    return finish(figure, "speedup over plain decoding", grid="x")


def forest(found: ComparisonDict) -> Figure:
    """The ratio of each way to the reference with its interval; filled where the difference is significant."""
    runs = found["runs"]
    figure, axes = draw_rows([visible(run["label"]) for run in runs])
    for y, run in enumerate(runs):
        if run["label"] == found["reference"]:
            axes.plot(1, y, "|", color=OTHER, markersize=16, mew=2)
            continue
        looks: dict[str, Any] = {"fmt": "o", "color": OTHER, "mfc": "none", "label": "not told apart"}
        if run["p_value"] is not None and run["p_value"] < LEVEL:
            colour, name = (BAD, "slower") if run["ratio"] < 1 else (GOOD, "faster")
            looks = {"fmt": "D", "color": colour, "label": name}
        draw_value(axes, run["ratio"], run["ratio_ci95"], y=y, **looks)
    axes.axvline(1, color=OTHER, linewidth=1, linestyle=":")
    return finish(figure, f"{UNITS[found['by']]}, over that of {visible(found['reference'])}", grid="x")


def accounting_waterfall(run: StoredRun) -> Figure:
    """The factors of the speedup as a waterfall of bars from 1, from Theorem 3.8's prediction to the measurement."""
    speedup = run.result["speedup"]
    factors = {name: speedup["accounting"][name] for name in FACTORS if name in speedup["accounting"]}
    if factors.get("rows", {}).get("factor") == 1:  # one row
        del factors["rows"]
    names = [textwrap.fill(FACTORS[name][0], 14) for name in factors]
    figure, axes = draw_rows([*names, "measured"], width=PHONE)
    level, ends = 1.0, [1.0]
    for y, (name, own) in enumerate(factors.items()):
        after = own["factor"] * level
        label, colour, hatch = ("a gain", GOOD, "") if after >= level else ("a loss", BAD, "///")
        if name == "theorem_3_8":
            label, colour = "Theorem 3.8", THEORY
        axes.barh(y, after - level, left=level, color=colour, hatch=hatch, edgecolor="white", linewidth=0, height=0.55,
                  label=label)  # fmt: skip
        axes.plot([after, after], [y - 0.3, y + 1.3], color=OTHER, linewidth=0.8)
        _tell(axes, y, max(level, after), f"x{own['factor']:.2f}" if y else f"{after:.2f}x", own["ci95"])
        level = after
        ends.append(level)
    axes.barh(len(factors), level - 1, left=1, color=MEASURED, height=0.55, label="measured")
    _tell(axes, len(factors), max(1, level), f"{level:.2f}x", speedup["ci95"])
    axes.axvline(1, color=OTHER, linewidth=1, linestyle=":")
    span = max(max(ends) - min(ends), 0.1)
    axes.set_xlim(min(ends) - 0.1 * span, max(ends) + 0.9 * span)  # with room for the words behind the last bar
    return finish(figure, "speedup over plain decoding", grid="", ncols=2)


def _tell(axes: Any, y: float, x: float, value: str, ci95: Sequence[float] | None) -> None:
    """A value and its interval behind a bar."""
    axes.annotate(f"{value}{within(ci95)}", (x, y), (5, 0), textcoords="offset points", va="center", fontsize=8)


def _draw_lap(axes: Any, y: float, left: float, width: float, lap: str) -> float:
    """A lap as a piece of a bar; returns where it ends."""
    axes.barh(y, width, left=left, color=LAPS[lap], hatch=HATCHES[lap], edgecolor="white", linewidth=0.5, height=0.6,
              label=LAP_NAMES[lap])  # fmt: skip
    return left + width


def round_times(runs: Sequence[StoredRun]) -> Figure:
    """Mean milliseconds of a round by lap, and of a one-token target step."""
    figure, axes = draw_rows([run.label if len(runs) > 1 else "a round" for run in runs])
    for y, run in enumerate(runs):
        calls = [r for r in run.rounds if r["rows"] == 1] or run.rounds
        end = 0.0
        for lap in LAPS:
            end = _draw_lap(axes, y, end, float(np.mean([r[f"{lap}_seconds"] for r in calls])) * 1e3, lap)
        step = run.result["cost"]["target_step_seconds"] * 1e3
        axes.plot([step, step], [y - 0.42, y + 0.42], color=BAD, linewidth=2.5, label="one-token target step")
        tokens = f"{run.result['block_efficiency']['mean']:.2f} tokens"
        axes.annotate(tokens, (end, y), (5, 0), textcoords="offset points", va="center", fontsize=9)
    axes.margins(x=0.14)
    return finish(figure, "milliseconds", grid="", ncols=5)


def timeline(runs: Sequence[StoredRun]) -> Figure:
    """The paper's Figure 5 from real traces: the first rounds of each run's first text over time, in milliseconds, and
    plain decoding of as many tokens."""
    traces = [[r for r in run.rounds if r["prompt"] == run.rounds[0]["prompt"]][:MOST_CALLS] for run in runs]
    tokens = max((sum(r["tokens"] for r in rounds) for rounds in traces), default=0)
    names = [f"{run.label if len(runs) > 1 else 'speculative'},\n{len(rounds)} rounds"
             for run, rounds in zip(runs, traces, strict=True)]  # fmt: skip
    figure, axes = draw_rows([*names, f"plain,\n{tokens} steps"], width=9)
    for y, rounds in enumerate(traces):
        end = 0.0
        for r in rounds:
            for _ in range(r["steps"]):
                end = _draw_lap(axes, y, end, r["draft_seconds"] * 1e3 / r["steps"], "draft")
            for lap in ("verify", "accept", "host"):
                end = _draw_lap(axes, y, end, r[f"{lap}_seconds"] * 1e3, lap)
            axes.annotate(
                f"+{r['tokens']}", (end, y - 0.3), (-2, 3), textcoords="offset points", ha="right", fontsize=8
            )
    end, own = 0.0, runs[0].result
    step = own["cost"]["target_step_seconds"]
    rest = max(0.0, 1 / (own["throughput"]["baseline_user_tokens_per_second"] or np.inf) - step)
    for _ in range(tokens):
        end = _draw_lap(axes, len(runs), end, step * 1e3, "verify")
        end = _draw_lap(axes, len(runs), end, rest * 1e3, "host")
    of = f"; {tokens} tokens of {visible(traces[0][0]['prompt'])}" if len(runs) == 1 else ""
    told = f"milliseconds{of}; a plain step and its rest at their mean times"
    return finish(figure, told, low=len(runs) + 0.5, high=-0.75, grid="")


def lengths_figure(found: ResultDict) -> Figure:
    """Rounds by the number of guesses that they accepted."""
    figure, axes = plt.subplots(figsize=HALF)
    total = max(1, sum(found["lengths"]))
    bars = axes.bar(
        range(len(found["lengths"])), [100 * count / total for count in found["lengths"]], color=MEASURED, width=0.7
    )
    axes.bar_label(bars, [f"{count:,}" for count in found["lengths"]], padding=3, fontsize=8)
    axes.margins(y=0.12)
    return finish(figure, "accepted guesses of a round", "% of rounds", whole=True, grid="")


def positions_figure(found: ResultDict, alpha: float | None) -> Figure:
    """The probability that a guess is accepted, given that those before it were, and together with them."""
    figure, axes = plt.subplots(figsize=HALF)
    places = range(1, len(found["joint"]) + 1)
    draw_estimates(axes, places, found["conditional"], "o-", MEASURED, "accepted, if those before were")
    draw_estimates(axes, places, found["joint"], "s--", GOOD, "accepted with all before")
    if alpha is not None and places:
        axes.plot(places, [alpha**place for place in places], ":", color=THEORY, label="alpha to that power")
    return finish(figure, "place of the guess in its round", "probability", low=0, high=1.02, whole=True, grid="y",
                  ncols=2)  # fmt: skip


def entropy_figure(found: ResultDict) -> Figure:
    """Alpha where the entropy of the drafter's, or of the target's distribution is in a bin."""
    bins_of = found["by_entropy"]
    edges = sorted({(own["low"], own["high"]) for bins in bins_of.values() for own in bins}, key=lambda edge: edge[0])
    places = {low: place for place, (low, _) in enumerate(edges)}
    figure, axes = plt.subplots(figsize=HALF)
    looks = {"drafter": ("o-", MEASURED, -0.06), "target": ("s--", THEORY, 0.06)}
    for model, bins in bins_of.items():
        look, colour, aside = looks.get(model, ("^:", OTHER, 0.0))
        beside = [places[own["low"]] + aside for own in bins]
        draw_estimates(axes, beside, [own["alpha"] for own in bins], look, colour, f"of the {model}")
    names = [f"{low:g}+" if high is None else f"{low:g}-{high:g}" for low, high in edges]
    axes.set_xticks(range(len(edges)), names, fontsize=8)
    return finish(figure, "entropy, nats", "alpha", low=0, high=1.02, grid="y")


def calibration_figure(found: ResultDict) -> Figure:
    """The target's probability of the drafter's most likely token, and how often guesses are accepted there, by the
    drafter's own probability of that token."""
    figure, axes = plt.subplots(figsize=HALF)
    bins = found["calibration"]["bins"]
    known = [own for own in bins if own["positions"] and own["agreement"] is not None]
    axes.plot([0, 1], [0, 1], ":", color=OTHER, label="calibrated")
    axes.plot([own["confidence"] for own in known], [own["agreement"] for own in known], "o-", color=MEASURED,
              markersize=5, label="p of that token")  # fmt: skip
    middles = [(own["low"] + own["high"]) / 2 for own in bins]
    draw_estimates(axes, middles, [own["accepted"] for own in bins], "s--", THEORY, "accepted / tested")
    axes.set_xlim(0, 1.02)
    return finish(figure, "largest q", low=0, high=1.02)
