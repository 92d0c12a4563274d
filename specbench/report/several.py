"""Several runs, of a sweep or of a comparison: their tables, the fastest in a sentence, figures and page."""

import html
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from specbench.errors import visible
from specbench.measure.compare import LEVEL
from specbench.report import files, page, tables, terminal
from specbench.report.files import Run
from specbench.report.page import GAIN, INK, LOSS, MEASURED, STYLE, THEORY
from specbench.report.tables import mean, number, ratio
from specbench.report.wandb import config_columns

LINES = (MEASURED, THEORY, GAIN, "#8a63a8", LOSS, "#b58a1b", "#4aa3a2", INK)
NOTES_SHOWN = 3  # on the terminal
MOST_TICKS = 8  # beyond them matplotlib chooses
RANKING = ["rank", "method", "speedup", "vs fastest", "p (Holm)"]  # columns of which the table of runs has not all
Measured = tuple[str, float | None, Sequence[float] | None]  # a name, its speedup, and the ends of the interval


def runs_table(runs: Sequence[Run]) -> pd.DataFrame:
    """One row for each run of a sweep."""
    return pd.DataFrame(
        {
            "run": run.label,
            "speedup": ratio(r["speedup"]["measured"], r["speedup"]["ci95"]),
            "Thm 3.8": ratio(r["speedup"]["theorem_3_8"], None),
            "lossless": tables.verdict(r["lossless"]),
            "alpha": mean(r["alpha"]),
            "block efficiency": mean(r["block_efficiency"]),
            **{name: number(r["cost"][name]) for name in "cvo"},
            "tokens/s": number(r["throughput"].get("speculative_tokens_per_second")),
            "plain tokens/s": number(r["throughput"].get("baseline_tokens_per_second")),
            "plain's bandwidth": tables.bandwidth_share(r) or "-",
        }
        for run in runs
        for r in (run.results,)
    )


def comparison(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """The ranking of methods that decoded the same prompts."""
    return pd.DataFrame(
        {
            "rank": str(row["rank"]),
            "method": row["method"],
            "speedup": ratio(row["speedup"], row["speedup_ci95"]),
            "vs fastest": ratio(row["ratio"], row["ratio_ci95"]),
            "p (Holm)": number(row["p_value"]),
            "alpha": number(row["alpha"]),
            "block efficiency": number(row["block_efficiency"]),
            **{name: number(row[name]) for name in "cvo"},
            "tokens/s": number(row["tokens_per_second"]),
        }
        for row in rows
    )


def sweep_csv(runs: Sequence[Run]) -> pd.DataFrame:
    """The settings of each run, and its numbers under the names of results.json, for summary.csv."""
    rows = ((run.label, run.results, run.results["details"]["choices"]) for run in runs)
    found = ({"run": x, **config_columns(r["config"], own), **tables.flat(tables.numbers(r))} for x, r, own in rows)
    return pd.DataFrame(found).map(lambda cell: visible(cell) if isinstance(cell, str) else cell)


def written(table: pd.DataFrame, form: str) -> str:
    """A table as Markdown or LaTeX; signs that have a meaning there are escaped."""
    table = table.map(lambda cell: visible(str(cell)))
    if form == "latex":
        return str(table.style.format(escape="latex").hide(axis="index").to_latex(hrules=True))
    escaped = table.map(lambda cell: re.sub(r"([\\|`*\[\]])", r"\\\1", html.escape(cell, quote=False)))
    return str(escaped.to_markdown(index=False, disable_numparse=True)) + "\n"


def answer(sentence: str, runs: Sequence[Run], frame: Any, folder: Path) -> None:
    """Prints the answer of several runs: a sentence, their verdicts and table, and where the files are."""
    terminal.show(sentence, "bold")
    terminal.show(verdicts(runs))
    terminal.show(terminal.table(frame))
    for note in notes_of(runs)[:NOTES_SHOWN]:
        terminal.show(f"note: {note}", "dim")
    terminal.show(f"files: {folder}", "dim")


def notes_of(runs: Sequence[Run]) -> list[str]:
    """The notes of all runs, each once; behind the run's label, unless all have it."""
    shared = set.intersection(*(set(run.results["notes"]) for run in runs))
    every = ((note, f"{run.label}: {note}") for run in runs for note in run.results["notes"])
    return [*dict.fromkeys(note if note in shared else own for note, own in every)]


def compared_headline(rows: Sequence[Mapping[str, Any]]) -> str:
    """The fastest method, whether it gains on plain decoding, and which methods it is not distinguished from."""
    measured = [(row["method"], row["speedup"], row["speedup_ci95"]) for row in rows]
    name, _, _ = best_of(measured)
    alike = ", ".join(row["method"] for row in rows if (row["p_value"] or 0) >= LEVEL and row["method"] != name)
    return fastest(measured, "methods") + (f"; not distinguished from it: {alike}" if alike else "")


def sweep_headline(runs: Sequence[Run]) -> str:
    """The run with the largest speedup, and how many others have intervals that overlap its own."""
    rows = [(run.label, own["measured"], own["ci95"]) for run in runs if (own := run.results["speedup"])]
    name, _, ends = best_of(rows)
    others = [row[2] for row in rows if row[0] != name and row[2] is not None]
    overlaps = 0 if ends is None else sum(other[1] >= ends[0] for other in others)
    return fastest(rows, "runs") + (f"; intervals that overlap its own: {overlaps}" if overlaps else "")


def best_of(rows: Sequence[Measured]) -> Measured:
    """The largest speedup that is shown to be a gain, or of all if none is."""
    gains = [row for row in rows if row[2] is not None and row[2][0] > 1]
    return max(gains or rows, key=lambda row: row[1] or 0.0)


def fastest(rows: Sequence[Measured], what: str) -> str:
    """`best_of` several speedups of `what`, in words."""
    name, speedup, ends = best_of(rows)
    gains = ends is not None and ends[0] > 1
    said = f"Fastest of {len(rows)} {what}"
    if not gains:
        said = f"None of {len(rows)} {what} is shown to gain on plain decoding; fastest"
    return f"{said}: {name}, {ratio(speedup, ends)} over plain decoding"


def write_page(folder: Path) -> Path:
    """Makes the page of a run, a comparison or a sweep again; returns its place. Raises ConfigError."""
    if (folder / files.RESULTS).is_file():
        run = files.read_run(folder)
        text = page.run_page(run, run.records)
    elif (folder / files.COMPARISON).is_file():
        text = comparison_page(files.read_comparison(folder), files.read_all(folder), folder.name)
    else:
        text = sweep_page(files.read_all(folder), folder.name)
    files.write_text(folder / files.PAGE, text)
    return folder / files.PAGE


def sweep_page(runs: Sequence[Run], title: str, headline: str = "") -> str:
    """The page of several runs; the headline is that of all of them, or one of the last sweep's."""
    rows = [(run.label, s["measured"], s["ci95"], s["theorem_3_8"]) for run in runs if (s := run.results["speedup"])]
    answers = headline or sweep_headline(runs), verdicts(runs)
    drawn = {"Speedup": speedups(rows), "Speedup by setting": sweep_lines(runs)}
    shown = {"Runs": runs_table(runs), "By category": tables.by_category(runs)}
    first = "Jobs of a sweep run at different times: python -m specbench.compare decodes each prompt by all in turn."
    return page.rendered(drawn, shown, runs, title=title, answer=answers, notes=[first, *notes_of(runs)])


def comparison_page(rows: Sequence[Mapping[str, Any]], runs: Sequence[Run], title: str) -> str:
    """The page of a comparison, from the rows of `measure.compare` and its runs."""
    predicted = {run.label: run.results["speedup"]["theorem_3_8"] for run in runs}
    bars = [(row["method"], row["speedup"], row["speedup_ci95"], predicted.get(row["method"])) for row in rows]
    places = {row["method"]: place for place, row in enumerate(rows)}
    ordered = sorted(runs, key=lambda run: places.get(run.label, len(rows)))
    shown = {"Ranking": comparison(rows)[RANKING], "Runs": runs_table(ordered)}
    shown["By category"] = tables.by_category(ordered)
    answers, notes = (compared_headline(rows), verdicts(runs)), notes_of(ordered)
    return page.rendered({"Speedup": speedups(bars)}, shown, runs, title=title, answer=answers, notes=notes)


def verdicts(runs: Sequence[Run]) -> str:
    """How many runs have which verdict, and what all runs have in common."""
    found = Counter(tables.verdict(run.results["lossless"]) for run in runs)
    said = "lossless: " + ", ".join(f"{number} of {len(runs)} {word}" for word, number in found.items())
    configs = [run.results["config"] | {"target": run.results["config"]["target"]["path"]} for run in runs]
    names = [name for name in ("target", "gamma", "temperature") if len({own[name] for own in configs}) == 1]
    counts = [run.results["counts"]["prompts"] for run in runs]
    prompts = " to ".join(map(str, sorted({min(counts), max(counts)})))
    same = [*(f"{name} {configs[0][name]}" for name in names), f"{prompts} prompts"]
    return f"{said}; {', '.join(same)}"


def speedups(rows: Sequence[tuple[str, float | None, Sequence[float] | None, float | None]]) -> Figure:
    """Rows of a name, a measured speedup, its interval, and Theorem 3.8's prediction."""
    with matplotlib.rc_context(STYLE):
        figure, axes = page.canvas(page.BARS + page.BAR * len(rows))
        for y, (_, measured, ends, predicted) in enumerate(rows):
            if measured is not None:
                axes.plot(measured, y, "o", color=MEASURED, label="measured, 95 % interval")
                axes.plot(ends or (measured, measured), (y, y), linewidth=2, color=MEASURED)
            if predicted is not None:
                axes.plot(predicted, y, "D", color=THEORY, markerfacecolor="none", label="Theorem 3.8")
        largest = max([1.0, *(value for row in rows for value in (row[1], row[3]) if value is not None)])
        axes.set_xlim(right=min(axes.get_xlim()[1], 1.5 * largest))  # a wide interval hides the other runs
        page.name_rows(axes, [row[0] for row in rows])
        page.legend(axes, 2)
        page.at_one(axes)
    return figure


def sweep_lines(runs: Sequence[Run]) -> Figure | None:
    """The speedup over the override with most numbers, three at least; Theorem 3.8's predictions are dashed."""
    settings = [dict(word.partition("=")[::2] for word in run.results["details"]["overrides"]) for run in runs]
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
        figure, axes = page.canvas(3)
        for colour, (name, points) in zip(LINES, sorted(lines.items()), strict=False):
            draw_line(axes, sorted(points, key=lambda point: point[0]), colour, visible(name) or "measured")
        axes.axhline(1, color=INK, linewidth=0.8, linestyle=":")
        axes.set(xlabel=key, ylabel="speedup over plain decoding")
        values = sorted({float(own[key]) for own in settings})
        if len(values) <= MOST_TICKS:
            axes.set_xticks(values, [f"{value:g}" for value in values])
        axes.plot([], [], "--", color=INK, label="Theorem 3.8")
        page.legend(axes, 2)
    return figure


def draw_line(axes: Any, points: Sequence[tuple[float, Mapping[str, Any]]], colour: str, name: str) -> None:
    """Speedups by a number, with intervals, and their predictions."""
    at, measured = [x for x, _ in points], [speedup["measured"] for _, speedup in points]
    axes.plot(at, measured, "o-", color=colour, label=name)
    for x, speedup in points:
        axes.plot((x, x), speedup["ci95"] or (speedup["measured"],) * 2, color=colour, linewidth=1.2, alpha=0.6)
    predicted = [float("nan") if speedup["theorem_3_8"] is None else speedup["theorem_3_8"] for _, speedup in points]
    axes.plot(at, predicted, "--", color=colour, linewidth=1)


def swept_number(settings: Sequence[Mapping[str, str]]) -> str | None:
    """The key that all runs set to finite numbers, with the most of them; None if none has three."""
    numbers = pd.DataFrame(settings).apply(pd.to_numeric, errors="coerce").replace([np.inf, -np.inf], np.nan)
    counts = numbers.dropna(axis="columns").nunique()
    return str(counts.idxmax()) if (counts >= 3).any() else None
