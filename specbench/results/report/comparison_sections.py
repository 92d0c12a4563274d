"""The sections of a comparison: the ranking, paired ratios as a forest plot, and what makes the distances."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from specbench.errors import ConfigError, visible
from specbench.results.comparison_sentence import Found, tested
from specbench.results.labels import CAUSES, UNITS
from specbench.results.reader import StoredRun, parse_json
from specbench.results.report.html_page import Report
from specbench.results.report.html_table import Cell, PageTable, without_empty
from specbench.results.report.run_description import label
from specbench.results.report.style import BAD, GOOD, OTHER
from specbench.results.shape import check_shape
from specbench.results.tables import interval, number
from specbench.stats.comparison import LEVEL, Comparison

FILE = "comparison.json"
MOST_PAIRS = 300  # in a table


def comparisons(folder: Path, runs: Sequence[StoredRun]) -> list[Found]:
    """The comparisons of these runs in a folder, with the `result` of each; none where it holds no comparison, or one
    of other runs. Raises ConfigError if the file cannot be used."""
    path = folder / FILE
    if not path.is_file():
        return []
    try:
        contents = parse_json(path.read_text(encoding="utf-8"), str(path))
        check_shape(contents, dict[str, list[Any]], "comparisons")
        for entry in contents["comparisons"]:
            check_shape(entry, Comparison, "comparisons")
            check_shape(entry["task"], dict[str, str], "task")
    except (OSError, UnicodeDecodeError, ValueError, KeyError) as error:
        raise ConfigError(f"{path} cannot be used: {error}") from error
    here = {run.folder.resolve(): run.result for run in runs}
    found = []
    for entry in contents["comparisons"]:
        ways = [run | {"result": here.get((folder / str(run.get("folder"))).resolve())} for run in entry["runs"]]
        if len(ways) > 1 and all(way["result"] for way in ways):
            found.append(entry | {"runs": ways})
    return found


def rankings(report: Report, compared: Sequence[Found]) -> None:
    """Adds the sections of each comparison."""
    links = {run.folder.resolve(): report.link(run) for run in report.runs}
    for at, found in enumerate(compared):
        task = f" at {label(found['task'])}" if found["task"] else ""
        many = len(found["pairs"])
        corrected = f", {many} tests corrected by Holm's method" if many > 1 else ""
        about = (
            f"{found['requests']} requests in {found['clusters']} clusters{corrected}; ranked by {UNITS[found['by']]}. "
            "Ways that cannot be told apart share a rank."
        )
        addresses = {run["label"]: links.get((report.folder / run["folder"]).resolve(), "") for run in found["runs"]}
        caption = (
            f"{UNITS[found['by']].capitalize()} over that of {found['reference']}, on the same prompts, with 95 % "
            "intervals (paired bootstrap over prompts). p holds for all pairs together."
        )
        drawn = report.figure(f"forest_{at}" if at else "forest", caption, partial(forest, found))
        table = PageTable(without_empty([_row(found, run, addresses) for run in found["runs"]]), sorts=True)
        report.section(f"Ranking{task}", texts=[about], tables=[table], figures=[drawn])
        _why(report, found, task)


def _row(found: Found, run: Mapping[str, Any], links: Mapping[str, str]) -> dict[str, Any]:
    n = run["numbers"]
    row: dict[str, Any] = {"rank": str(run["rank"]) if tested(found) else "-"}
    row |= {"way": Cell(run["label"], link=links[run["label"]]), "tokens/s": number(n["tokens_per_second"], 1)}
    row |= {f"of {found['reference']}": number(run["ratio"], 3)}
    row |= {"95 %": "-" if run["ratio_ci95"] is None else interval(run["ratio_ci95"], 3), "p": p_value(run["p_value"])}
    row |= {"speedup": number(n["speedup"], 2), "alpha": number(n["alpha"], 3)}
    row |= {"alpha on plain's text": number(n["alpha_on_target_text"], 3), "block efficiency": number(n["tau"], 2)}
    return row | {"c": number(n["c"], 3), "v": number(n["v"], 2), "o": number(n["o"], 2)}


def p_value(value: float | None) -> str:
    """A p-value; "-" where there were too few prompts for one."""
    return "-" if value is None else "< .001" if value < 0.001 else f"{value:.3f}"


def _why(report: Report, found: Found, task: str) -> None:
    """Adds the factors of the distances, without those that are 1.00 for every way, and all pairs."""
    others = [run for run in found["runs"] if run["causes"]]
    shown = [name for name in CAUSES if any(abs(run["causes"].get(name, 1.0) - 1) >= 0.005 for run in others)]
    rows = [
        {"way": run["label"], "ratio": number(run["ratio"], 3), **{CAUSES[name]: _factor(run, name) for name in shown}}
        for run in others
    ]
    caption = f"Factors whose product is the ratio to {found['reference']}; * marks those whose interval excludes 1."
    pairs = [
        {"first": pair["first"], "second": pair["second"], "first / second": number(pair["ratio"], 3),
         "95 %": "-" if pair["ci95"] is None else interval(pair["ci95"], 3), "p": p_value(pair["p_value"]),
         "p, corrected": p_value(pair["corrected"])}
        for pair in found["pairs"][:MOST_PAIRS]
    ]  # fmt: skip
    told = "Every pair of ways." + (
        f" The first {MOST_PAIRS} of {len(found['pairs'])}." * (len(found["pairs"]) > MOST_PAIRS)
    )
    tables = [PageTable(rows, caption)] if shown else []
    tables += [PageTable(without_empty(pairs), told, sorts=True)] if len(found["pairs"]) > 1 else []
    report.section(f"Why{task}", tables=tables)


def _factor(run: Mapping[str, Any], name: str) -> str:
    ci95 = run["causes_ci95"].get(name)
    return f"x{run['causes'].get(name, 1.0):.2f}" + ("*" if ci95 and not ci95[0] <= 1 <= ci95[1] else "")


def forest(found: Found) -> Figure:
    """The ratio of each way to the reference with its interval; filled where the difference is significant."""
    runs = found["runs"]
    figure, axes = plt.subplots(figsize=(8, 1.3 + 0.36 * len(runs)))
    for y, run in enumerate(runs):
        if run["label"] == found["reference"]:
            axes.plot(1, y, "|", color=OTHER, markersize=16, mew=2)
            continue
        sure = run["p_value"] is not None and run["p_value"] < LEVEL
        colour = OTHER if not sure else BAD if run["ratio"] < 1 else GOOD
        ends = run["ratio_ci95"] or (run["ratio"], run["ratio"])
        errors = np.abs(np.array(ends)[:, None] - run["ratio"])
        axes.errorbar(run["ratio"], y, xerr=errors, fmt="o" if not sure else "D", color=colour, capsize=3,
                      mfc=colour if sure else "none", markersize=7)  # fmt: skip
    axes.axvline(1, color=OTHER, linewidth=1, linestyle=":")
    axes.set_yticks(range(len(runs)), [visible(run["label"]) for run in runs])
    axes.set_ylim(len(runs) - 0.5, -0.5)
    axes.set_xlabel(f"{UNITS[found['by']]}, over that of {visible(found['reference'])}")
    axes.grid(axis="x")
    looks = {"slower": ("D", BAD, BAD), "faster": ("D", GOOD, GOOD), "not told apart": ("o", OTHER, "none")}
    handles = [Line2D([], [], marker=m, color=c, mfc=f, linestyle="", label=n) for n, (m, c, f) in looks.items()]
    figure.legend(handles=handles, loc="outside upper left", ncols=3, fontsize=9)
    return figure
