"""The sections of a page of many runs: of a comparison the ranking and its reasons first."""

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from specbench.errors import ConfigError
from specbench.results.atomic_files import file_text, parse_json
from specbench.results.comparison_tables import ComparisonDict, about, causes_table, pairs_table, ranking_table
from specbench.results.fields import FACTORS, FIELDS, SWEEP_PAGE, UNITS
from specbench.results.reader import StoredRun, check_kind
from specbench.results.report import figures, sweep_figures
from specbench.results.report.html_page import PAGE, Drawing, Section
from specbench.results.report.run_sections import (
    beam_search,
    beta_section,
    times_of_rounds,
    waiting_times,
    which_gamma,
)
from specbench.results.report.style import MOST_PANELS
from specbench.results.sweep_table import STEADY, page_row
from specbench.results.table import Cell, Table
from specbench.results.wording import label
from specbench.run_config import Role, with_role
from specbench.stats.comparison import Comparison

COMPARISON = "comparison.json"
HEAT_MAPS = {"alpha/mean": "alpha", "speedup/measured": "measured speedup"}
# Settings, or their groups, that say how much is measured and what is kept: no axes of a map.
NO_AXES = (*with_role(Role.LABEL | Role.AMOUNT), "data.limit", "data.count")
MOST_PAIRS = 3  # of swept keys that have heat maps
OF_INTERVALS = "a paired bootstrap over prompts, within one process unless the run repeated"
OF_CELLS = (
    "An empty cell has no run; n: so many runs of the same settings, averaged. Runs that differ in anything else are "
    "not averaged: one map for each of its values."
)
LACKING = "The pages of runs that have none yet are written by python -m specbench.report FOLDER."


def comparisons(folder: Path, runs: Sequence[StoredRun]) -> list[ComparisonDict]:
    """The comparisons of these runs in a folder, with the `result` of each; none where it holds no comparison, or one
    of other runs. Raises ConfigError if the file cannot be used."""
    path = folder / COMPARISON
    if not path.is_file():
        return []
    contents = check_kind(parse_json(file_text(path), str(path)), dict[str, list[Any]], str(path), "comparisons")
    if "comparisons" not in contents:
        raise ConfigError(f"{path} cannot be used: it has no comparisons")
    here = {run.folder.resolve(): run.result for run in runs}
    found = []
    for entry in contents["comparisons"]:
        check_kind(entry, Comparison, str(path), "comparisons")
        check_kind(entry.get("task"), dict[str, str], str(path), "comparisons.task")
        ways = [run | {"result": here.get((folder / str(run.get("folder"))).resolve())} for run in entry["runs"]]
        if len(ways) > 1 and all(way["result"] for way in ways):
            found.append(entry | {"runs": ways})
    return found


def ranking_sections(compared: Sequence[ComparisonDict], folder: Path) -> Iterator[Section]:
    """Two sections for each comparison: the ranking, and why."""
    for place, found in enumerate(compared):
        task = f" at {label(found['task'])}" if found["task"] else ""
        names = {run["label"]: {"way": Cell(run["label"], link(folder / run["folder"], folder))}
                 for run in found["runs"]}  # fmt: skip
        caption = (
            f"{UNITS[found['by']].capitalize()} over that of {found['reference']}, on the same prompts, with 95 % "
            "intervals (paired bootstrap over prompts). p holds for all pairs together."
        )
        table = ranking_table(found, names, f"of {found['reference']}")
        table.sorts = True
        drawing = Drawing(f"forest_{place}" if place else "forest", caption, partial(figures.forest, found))
        told = f"{about(found)}. Ways that cannot be told apart share a rank."
        yield Section(f"Ranking{task}", [told], [drawing], [table])
        why = causes_table(found, {run["label"]: {"way": run["label"]} for run in found["runs"]}, marked=True)
        why.title = (
            f"Factors whose product is the ratio to {found['reference']}; * marks those whose interval excludes 1."
        )
        pairs = [pairs_table(found)] if len(found["pairs"]) > 1 else []
        yield Section(f"Why{task}", tables=[*([why] if len(why.columns) > 2 else []), *pairs])


def sweep_sections(runs: Sequence[StoredRun], folder: Path, heat_maps: bool) -> Iterator[Section]:
    """The sections of a sweep, or of the ways of a comparison."""
    lacking = [] if all((run.folder / PAGE).is_file() for run in runs) else [LACKING]
    yield Section("All runs", lacking, tables=[_all_runs(runs, folder)])
    caption = "Speedup of every run; the diamond is Theorem 3.8 from the run's own alpha and c."
    if not all(run.result["repeats"] for run in runs):
        caption += " Where a run did not repeat, intervals are of its prompts: another process may lie outside."
    drawing = Drawing("predicted_and_measured", caption, partial(figures.predicted_and_measured, runs))
    yield Section("Measured and predicted", figures=[drawing])
    yield Section("Why: the factors of every run", tables=[_factors(runs)])
    if heat_maps and (maps := maps_of(runs)):
        yield Section("Over two keys at a time", figures=maps)
    groups = sweep_figures.group_runs(runs, ("gamma",))
    told = "A panel for each setting but gamma, a line for each run"
    more = _cut(len(groups), "settings")
    lines = "replay (solid) and Theorem 3.8 (dashed); dots are what was measured, with 95 % intervals."
    yield which_gamma(groups, f"{told}: {lines}{more}")
    yield from beta_section(groups, f"{told}, +- 1.96 standard errors.{more}")
    yield times_of_rounds(runs, "A mean round of each run.")
    yield from beam_search(runs)
    if len({run.result["config"]["lenience"] for run in runs}) > 1:
        caption = "Drift is the mean total variation between a tested position's output law and the target's."
        yield Section("Lenience", figures=[Drawing("lenience", caption, partial(sweep_figures.lenience_figure, runs))])
    yield from waiting_times(runs)


def link(folder: Path, page_folder: Path) -> str:
    """The address of a run's own page from the page in another folder; "" where there is none."""
    page = folder / PAGE
    return quote(os.path.relpath(page, page_folder).replace(os.sep, "/")) if page.is_file() else ""


def _all_runs(runs: Sequence[StoredRun], folder: Path) -> Table:
    """A row for each run: its page, what it was, and what was measured."""
    rows = []
    for run in runs:
        address, name = link(run.folder, folder), "open" if run.keys else run.label
        page = Cell(name, link=address) if address else Cell("-" if run.keys else name)
        rows.append({"page": page, **run.keys, **page_row(run.result, SWEEP_PAGE)})
    if all(str(row["machine"]) == STEADY for row in rows):
        for row in rows:
            del row["machine"]
    table = Table.of(rows, sorts=True)
    abouts = {field.head: field.about for field in FIELDS.values()} | {"95 %": OF_INTERVALS}
    table.columns = [replace(column, about=abouts.get(column.name, "")) for column in table.columns]
    return table


def _factors(runs: Sequence[StoredRun]) -> Table:
    """The accounting of every run in which something was drafted, without the factors that are 1.000 in all."""
    rows = []
    for run in runs:
        if accounting := run.result["speedup"]["accounting"]:
            own = {FACTORS[name][0]: f"{entry['factor']:.3f}" for name, entry in accounting.items()}
            rows.append({"run": run.label, **own, "measured": f"{run.result['speedup']['measured']:.3f}"})
    equal = {name for row in rows for name in row if all(other.get(name, "1.000") == "1.000" for other in rows)}
    kept = [{name: cell for name, cell in row.items() if name not in equal} for row in rows]
    caption = "They multiply to the measured speedup; those that are 1.000 in every run are left out."
    return Table.of(kept, caption, sorts=len(kept) > 8)


def maps_of(runs: Sequence[StoredRun]) -> list[Drawing]:
    """Numbers over two swept keys, for the first pairs of keys. Runs that differ in a third one are not averaged: each
    of its values has a map."""
    swept = dict.fromkeys(key for run in runs for key in run.keys)
    axes = [key for key in swept if not {key, key.partition(".")[0]} & {*NO_AXES}]
    pairs = [(x, y) for x, y in itertools.combinations(axes, 2) if not _one_each(runs, x, y)]
    found = []
    for x, y in pairs[:MOST_PAIRS]:
        more = _cut(len(sweep_figures.group_runs(runs, (x, y))), "maps")
        for path, what in HEAT_MAPS.items():
            caption = f"{what.capitalize()} over {x} and {y}. {OF_CELLS}{more}"
            make = partial(sweep_figures.heat_maps, runs, x, y, path, what)
            found.append(Drawing(f"heat_{path.split('/')[0]}_{x}_{y}", caption, make))
    return found


def _cut(groups: int, what: str) -> str:
    """Of how many panels a figure has the first ones; "" if it has all."""
    return f" The first {MOST_PANELS} of {groups} {what}." if groups > MOST_PANELS else ""


def _one_each(runs: Sequence[StoredRun], x: str, y: str) -> bool:
    """Whether two keys move together, so that a map of them would be a diagonal."""
    cells = {(run.keys.get(x), run.keys.get(y)) for run in runs}
    return len(cells) <= max(len({cell[0] for cell in cells}), len({cell[1] for cell in cells}))
