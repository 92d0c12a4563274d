"""The sections of a comparison: the ranking, paired ratios as a forest plot, and what makes the distances."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from specbench.errors import ConfigError, visible
from specbench.results.atomic_files import file_text, parse_json
from specbench.results.comparison_tables import ComparisonDict, about, causes_table, pairs_table, ranking_table
from specbench.results.fields import UNITS
from specbench.results.reader import StoredRun, check_kind
from specbench.results.report.html_page import Report
from specbench.results.report.style import BAD, GOOD, OTHER, finish, name_rows
from specbench.results.table import Cell
from specbench.results.wording import label
from specbench.stats.comparison import LEVEL, Comparison

FILE = "comparison.json"


def comparisons(folder: Path, runs: Sequence[StoredRun]) -> list[ComparisonDict]:
    """The comparisons of these runs in a folder, with the `result` of each; none where it holds no comparison, or one
    of other runs. Raises ConfigError if the file cannot be used."""
    path = folder / FILE
    if not path.is_file():
        return []
    contents = check_kind(parse_json(file_text(path), str(path)), dict[str, list[Any]], str(path), "comparisons")
    if "comparisons" not in contents:
        raise ConfigError(f"{path} cannot be used: it has no comparisons")
    for entry in contents["comparisons"]:
        check_kind(entry, Comparison, str(path), "comparisons")
        check_kind(entry.get("task"), dict[str, str], str(path), "comparisons.task")
    here = {run.folder.resolve(): run.result for run in runs}
    found = []
    for entry in contents["comparisons"]:
        ways = [run | {"result": here.get((folder / str(run.get("folder"))).resolve())} for run in entry["runs"]]
        if len(ways) > 1 and all(way["result"] for way in ways):
            found.append(entry | {"runs": ways})
    return found


def add_rankings(report: Report, compared: Sequence[ComparisonDict]) -> None:
    """Adds the sections of each comparison."""
    links = {run.folder.resolve(): report.link(run) for run in report.runs}
    for at, found in enumerate(compared):
        task = f" at {label(found['task'])}" if found["task"] else ""
        told = f"{about(found)}. Ways that cannot be told apart share a rank."
        names = {run["label"]: {"way": Cell(run["label"], links.get((report.folder / run["folder"]).resolve(), ""))}
                 for run in found["runs"]}  # fmt: skip
        caption = (
            f"{UNITS[found['by']].capitalize()} over that of {found['reference']}, on the same prompts, with 95 % "
            "intervals (paired bootstrap over prompts). p holds for all pairs together."
        )
        drawn = report.figure(f"forest_{at}" if at else "forest", caption, partial(forest, found))
        table = ranking_table(found, names, f"of {found['reference']}")
        table.sorts = True
        report.section(f"Ranking{task}", texts=[told], tables=[table], figures=[drawn])
        why = causes_table(found, {run["label"]: {"way": run["label"]} for run in found["runs"]}, marked=True)
        why.title = (
            f"Factors whose product is the ratio to {found['reference']}; * marks those whose interval excludes 1."
        )
        shown = [why] if len(why.columns) > 2 else []
        report.section(f"Why{task}", tables=[*shown, *([pairs_table(found)] if len(found["pairs"]) > 1 else [])])


def forest(found: ComparisonDict) -> Figure:
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
    name_rows(axes, [visible(run["label"]) for run in runs])
    looks = {"slower": ("D", BAD, BAD), "faster": ("D", GOOD, GOOD), "not told apart": ("o", OTHER, "none")}
    handles = [Line2D([], [], marker=m, color=c, mfc=f, linestyle="", label=n) for n, (m, c, f) in looks.items()]
    told = f"{UNITS[found['by']]}, over that of {visible(found['reference'])}"
    return finish(figure, axes, told, grid="x", handles=handles, ncols=3, fontsize=9)
