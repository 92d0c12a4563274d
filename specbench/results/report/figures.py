"""Figures of measured runs: each function takes stored runs and returns a matplotlib figure."""

import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from specbench import theory
from specbench.errors import visible
from specbench.results.fields import FACTORS
from specbench.results.latency_table import DELAYS, served_rows
from specbench.results.reader import StoredRun
from specbench.results.report.style import (
    BAD,
    GOOD,
    HATCHES,
    LAPS,
    MARKERS,
    MEASURED,
    OTHER,
    SERIES,
    THEORY,
    finish,
    name_rows,
)
from specbench.results.wording import interval, label
from specbench.stats.latency import PERCENTILES


def predicted_and_measured(runs: Sequence[StoredRun]) -> Figure:
    """Speedup of every run: measured with its interval, and both predictions (Theorem 3.8, corrected)."""
    figure, axes = plt.subplots(figsize=(8, 1.2 + 0.34 * len(runs)))
    y = np.arange(len(runs))
    speedups = [run.result["speedup"] for run in runs]
    measured = np.array([s["measured"] for s in speedups])
    errors = np.concatenate([_errors(s) for s in speedups], 1)
    for key, marker, name in (
        ("theorem_3_8", "D", "Theorem 3.8"),
        ("corrected", "|", "from tokens per round and all costs"),
    ):
        values = [np.nan if s[key] is None else s[key] for s in speedups]
        axes.plot(
            values, y, marker, color=THEORY, markersize=7 if marker == "D" else 13, label=name, mew=1.5, mfc="none"
        )
    axes.errorbar(measured, y, xerr=errors, fmt="o", color=MEASURED, capsize=3, label="measured, 95 % interval")
    axes.axvline(1, color=OTHER, linewidth=1, linestyle=":")
    name_rows(axes, [run.label for run in runs])
    return finish(figure, axes, "speedup over plain decoding", grid="x", ncols=3)


def accounting_waterfall(run: StoredRun) -> Figure:
    """The factors of the speedup as a waterfall, from Theorem 3.8's prediction to the measurement."""
    factors = run.result["speedup"]["accounting"]
    level, highest, names = 0.0, 0.0, [name for name in FACTORS if name in factors]
    if factors.get("rows", {}).get("factor") == 1:  # one row
        names.remove("rows")
    figure, axes = plt.subplots(figsize=(1.1 * len(names) + 1.5, 3.6))
    for x, name in enumerate(names):
        after = factors[name]["factor"] if x == 0 else level * factors[name]["factor"]
        colour = THEORY if x == 0 else GOOD if after >= level else BAD
        hatch = "///" if colour == BAD else ""
        axes.bar(x, after - level, bottom=level, color=colour, hatch=hatch, edgecolor="white", linewidth=0, width=0.6)
        if x:
            axes.plot([x - 1.3, x + 0.3], [level, level], color=OTHER, linewidth=0.8)
        text = f"{after:.2f}x" if x == 0 else f"x{factors[name]['factor']:.2f}"
        _told(axes, x, max(level, after), text, factors[name]["ci95"])
        level, highest = after, max(highest, after)
    axes.bar(len(names), level, color=MEASURED, width=0.6)
    _told(axes, len(names), level, f"{level:.2f}x", run.result["speedup"]["ci95"])
    words = [textwrap.fill(FACTORS[name][0], 12) for name in names]
    axes.set_xticks(range(len(names) + 1), [*words, "measured"], fontsize=9)
    axes.axhline(1, color=OTHER, linewidth=1, linestyle=":")
    looks = {"Theorem 3.8": (THEORY, ""), "a gain": (GOOD, ""), "a loss": (BAD, "///"), "measured": (MEASURED, "")}
    handles = [Patch(facecolor=c, hatch=h, edgecolor="white", lw=0, label=name) for name, (c, h) in looks.items()]
    return finish(figure, axes, "", "speedup over plain decoding", low=0, high=1.2 * highest, grid="", handles=handles,
                  ncols=4, fontsize=8)  # fmt: skip


def _told(axes: Any, x: float, y: float, value: str, ci95: Sequence[float] | None) -> None:
    """A value and its interval above a bar."""
    text = value if ci95 is None else f"{value}\n{interval(ci95)}"
    axes.annotate(text, (x, y), (0, 4), textcoords="offset points", ha="center", fontsize=8)


def _errors(speedup: dict[str, Any]) -> Any:
    """The lengths [2, 1] of the error bars of a measured speedup: none with too few prompts."""
    measured = speedup["measured"]
    return np.abs(np.array(speedup["ci95"] or (measured, measured))[:, None] - measured)


def gamma_figure(run: StoredRun) -> Figure:
    """Speedup by gamma of one run."""
    figure, axes = plt.subplots(figsize=(8, 4))
    sweep = run.result["gamma_sweep"]
    draw_by_gamma(axes, run, np.arange(max([entry["gamma"] for entry in sweep], default=8) + 5), alone=True)
    axes.margins(y=0.1)
    return finish(figure, axes, "gamma, tokens drafted a round", "speedup over plain decoding", low=0, grid="",
                  legend="outside right upper", fontsize=8)  # fmt: skip


def draw_by_gamma(axes: Any, run: StoredRun, gammas: Any, alone: bool) -> None:
    """Speedup by gamma: Theorem 3.8 (dashed) and replay as curves, the run as a point with its interval, at its gamma
    or at the mean of gammas that a policy varied. `alone`: with the interval of replay, and the best gamma of each."""
    result, sweep = run.result, run.result["gamma_sweep"]
    alpha, c = result["alpha"]["mean"], result["cost"]["c"]
    if alpha is not None and c is not None:
        curve = [theory.walltime_improvement(alpha, gamma, c) for gamma in gammas]
        axes.plot(gammas, curve, "--", color=THEORY, linewidth=1, label="Theorem 3.8")
        if alone:
            best = int(np.argmax(curve))
            axes.plot(best, curve[best], "*", color=THEORY, markersize=12, label="gamma* of Theorem 3.8", linestyle="")
    x, y = [e["gamma"] for e in sweep], [e["speedup"] for e in sweep]
    if sweep:
        axes.plot(x, y, color=MEASURED, linewidth=1.5 if alone else 1, label="replay of this run")
    if sweep and alone:
        low, high = np.array([e["ci95"] or (e["speedup"], e["speedup"]) for e in sweep]).T
        axes.fill_between(x, low, high, color=MEASURED, alpha=0.15, linewidth=0)
        top = int(np.argmax(y))
        axes.plot(x[top], y[top], "s", color=MEASURED, markersize=9, mfc="none", label="best by replay", linestyle="")
    counts, gamma = result["counts"], result["gamma"]
    gamma = counts["drafted"] / counts["rounds"] if gamma is None else gamma
    axes.errorbar([gamma], [result["speedup"]["measured"]], yerr=_errors(result["speedup"]), fmt="o", color=MEASURED,
                  capsize=4, label="measured, 95 % interval")  # fmt: skip
    axes.axhline(1, color=OTHER, linewidth=1, linestyle=":")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid()


def beta_figure(run: StoredRun) -> Figure:
    """Mean beta by the place of the guess in its round, of one run, beside alpha."""
    figure, axes = plt.subplots(figsize=(9, 3.4))
    draw_beta(axes, run)
    for key, colour, dashes, name in (
        ("alpha", THEORY, "--", "alpha"),
        ("alpha_on_target_text", GOOD, "-.", "on the target's own text"),
    ):
        if (mean := run.result[key]["mean"]) is not None:
            axes.axhline(mean, color=colour, linestyle=dashes, linewidth=1, label=name)
    return finish(figure, axes, "place of the guess in its round", "mean beta", grid="", legend="outside right upper",
                  fontsize=8)  # fmt: skip


def draw_beta(axes: Any, run: StoredRun, markersize: int = 6) -> None:
    """Mean beta of the first, second, ... guess of a round, with 95 % intervals."""
    found = [entry for entry in run.result["beta_by_position"] if entry["mean"] is not None]
    errors = [1.96 * (entry["stderr"] or 0) for entry in found]
    axes.errorbar(range(1, len(found) + 1), [e["mean"] for e in found], yerr=errors, color=MEASURED, marker="o",
                  markersize=markersize, capsize=markersize / 2, linewidth=markersize / 4,
                  label="tested positions, 95 % interval")  # fmt: skip
    axes.set_ylim(0, 1.02)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y")


def round_times(runs: Sequence[StoredRun]) -> Figure:
    """Mean milliseconds of a round by lap, and of a one-token target step."""
    figure, axes = plt.subplots(figsize=(8, 1.5 + 0.36 * len(runs)))
    for y, run in enumerate(runs):
        calls = [r for r in run.rounds if r["rows"] == 1] or run.rounds
        left = 0.0
        for lap, colour in LAPS.items():
            mean = float(np.mean([r[f"{lap}_seconds"] for r in calls])) * 1e3
            axes.barh(y, mean, left=left, color=colour, hatch=HATCHES[lap], edgecolor="white", linewidth=0, height=0.6)
            left += mean
        step = run.result["cost"]["target_step_seconds"] * 1e3
        axes.plot([step, step], [y - 0.42, y + 0.42], color=BAD, linewidth=2.5)
        tokens = run.result["block_efficiency"]["mean"]
        axes.annotate(f"{tokens:.2f} tokens", (left, y), (5, 0), textcoords="offset points", va="center", fontsize=9)
    handles: list[Any] = [_swatch(lap, lap) for lap in LAPS]
    handles.append(Line2D([], [], color=BAD, linewidth=2, label="one-token target step"))
    name_rows(axes, [run.label if len(runs) > 1 else "a round" for run in runs])
    axes.margins(x=0.14)
    return finish(figure, axes, "milliseconds", grid="", handles=handles, ncols=5)


def lenience_figure(runs: Sequence[StoredRun]) -> Figure:
    """Alpha, speedup and drift by lenience (A.5), with a line for each setting of the other swept keys."""
    figure, axes = plt.subplots(1, 3, figsize=(10, 3.6))
    paths = {"alpha": ("alpha", "mean"), "speedup": ("speedup", "measured"), "drift: total variation": ("drift", "tv")}
    groups: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        others = label({key: value for key, value in run.keys.items() if key != "lenience"})
        groups.setdefault(visible(others or f"temperature {run.result['config']['temperature']:g}"), []).append(
            run.result
        )
    x = sorted({run.result["config"]["lenience"] for run in runs})
    looks = zip(groups.items(), SERIES, MARKERS, strict=False)  # as many lines as colours
    for (name, results), colour, marker in looks:
        here = sorted(results, key=lambda result: result["config"]["lenience"])
        places = [result["config"]["lenience"] for result in here]
        for panel, (group, key) in zip(axes, paths.values(), strict=True):
            panel.plot(places, [result[group][key] for result in here], marker=marker, color=colour, label=name)
    for panel, name in zip(axes, paths, strict=True):
        panel.set_title(name)
        panel.set_xlabel("lenience l")
        panel.set_xscale("log")
        panel.set_xticks(x, [f"{value:g}" for value in x])
        panel.minorticks_off()
        panel.set_ylim(bottom=0)
        panel.grid()
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper left", ncols=3, fontsize=8)
    return figure


def latency_figure(runs: Sequence[StoredRun]) -> Figure:
    """Waiting times of requests that arrive over time: p50, p90 and p99 of each run's decoders, at each rate; without
    percentiles that too few requests are beyond."""
    rows = [(run, row) for run in runs for row in served_rows(run.result)]
    figure, axes = plt.subplots(1, 3, figsize=(11, 1.6 + 0.42 * len(rows)), sharey=True)
    markers = dict(zip(PERCENTILES, "o|D", strict=True))
    for panel, (delay, (name, scale)) in zip(axes, DELAYS.items(), strict=True):
        for y, (_, row) in enumerate(rows):
            seconds = {p: value for p in markers if (value := row.percentile(delay, p)) is not None}
            panel.plot([value * scale for value in seconds.values()], [y] * len(seconds), color=OTHER, linewidth=1)
            ours = row.way == "speculative"
            colour = MEASURED if ours else THEORY
            for p, value in seconds.items():
                panel.plot(value * scale, y, markers[p], color=colour, markersize=7, mfc=colour if ours else "none")
        panel.set_title(name)
        panel.set_xlabel("milliseconds" if scale > 1 else "seconds")
        panel.margins(x=0.06)
        panel.set_xlim(left=0)
        panel.grid(axis="x")
    name_rows(axes[0], [row.label if len(runs) == 1 else f"{run.label}, {row.label}" for run, row in rows])
    handles = [Line2D([], [], color=OTHER, marker=m, linestyle="", label=f"p{p}", mfc="none")
               for p, m in markers.items()]  # fmt: skip
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return figure


def _swatch(lap: str, name: str) -> Patch:
    """A lap's entry in a legend."""
    return Patch(facecolor=LAPS[lap], hatch=HATCHES[lap], edgecolor="white", linewidth=0, label=name)


def timeline(run: StoredRun) -> Figure:
    """The paper's Figure 5 from a real trace: the first rounds over time, in milliseconds, and plain decoding of as
    many tokens."""
    first = run.rounds[0]["prompt"]
    rounds = [r for r in run.rounds if r["prompt"] == first][:8]
    step = run.result["cost"]["target_step_seconds"] * 1e3
    figure, axes = plt.subplots(figsize=(9, 2.6))
    now, tokens = 0.0, 0
    for r in rounds:
        drafted = max(1, r["steps"])
        one = r["draft_seconds"] * 1e3 / drafted
        for _ in range(r["steps"]):
            axes.barh(0, one, left=now, color=LAPS["draft"], edgecolor="white", linewidth=0.5, height=0.7)
            now += one
        for lap in ("verify", "accept", "host"):
            length = r[f"{lap}_seconds"] * 1e3
            axes.barh(
                0, length, left=now, color=LAPS[lap], hatch=HATCHES[lap], edgecolor="white", height=0.7, linewidth=0
            )
            now += length
        tokens += r["tokens"]
        axes.annotate(f"+{r['tokens']}", (now, -0.36), (-2, 3), textcoords="offset points", ha="right", fontsize=8)
    for number in range(tokens):
        axes.barh(1, step, left=number * step, color=LAPS["verify"], hatch=HATCHES["verify"], edgecolor="white",
                  linewidth=0.5, height=0.7)  # fmt: skip
    handles = [_swatch(lap, {"draft": "a drafter step", "verify": "a call of the target"}.get(lap, lap))
               for lap in LAPS]  # fmt: skip
    axes.set_yticks([0, 1], [f"speculative,\n{len(rounds)} rounds", f"plain,\n{tokens} steps"])
    told = f"milliseconds; {tokens} tokens of {visible(first)}; a plain step at its mean time"
    return finish(figure, axes, told, low=1.5, high=-0.75, grid="", handles=handles, ncols=4)
