"""The sections of a page of many runs."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from specbench.results.fields import FACTORS, FIELDS, SWEEP_PAGE
from specbench.results.reader import StoredRun
from specbench.results.report import figures
from specbench.results.report import sweep_figures as panels
from specbench.results.report.html_page import Report
from specbench.results.report.run_sections import beam_search, of_the_paper, under_load
from specbench.results.sweep_table import STEADY, page_row
from specbench.results.table import Cell, Table
from specbench.run_config import Role, with_role

HEAT_MAPS = {"alpha/mean": "alpha", "speedup/measured": "measured speedup"}
# Settings, or their groups, that say how much is measured and what is kept: no axes of a map.
NO_AXES = (*with_role(Role.LABEL | Role.AMOUNT), "data.limit", "data.count")
MOST_PAIRS = 3  # of swept keys that have heat maps
OF_INTERVALS = "a paired bootstrap over prompts, within one process unless the run repeated"
LACKING = "The pages of runs that have none yet are written by python -m specbench.report FOLDER."


def add_runs(report: Report, compared: bool = False) -> None:
    """Adds the sections of a sweep, or of the ways of a comparison, whose ranking comes before them."""
    runs = report.runs
    caption = "Speedup of every run; the diamond is Theorem 3.8 from the run's own alpha and c."
    if not all(run.result["repeats"] for run in runs):
        caption += " Intervals are of one process, where a run did not repeat: another process may lie outside."
    measured = report.figure("predicted_and_measured", caption, lambda: figures.predicted_and_measured(runs))
    table = _all_runs(report)
    lacking = [] if all(report.link(run) for run in runs) else [LACKING]
    report.section("All runs", texts=lacking, tables=[table])
    report.section("Measured and predicted", figures=[measured])
    report.section("Why: the factors of every run", tables=[_factors(runs)])
    if not compared and (maps := _heat_maps(report)):
        report.section("Over two keys at a time", figures=maps)
    _panels(report)
    caption = "A mean round of each run."
    drawn = report.figure("round_times", caption, lambda: figures.round_times(runs))
    report.section("Where the time goes", figures=[drawn])
    beam_search(report)
    under_load(report)
    of_the_paper(report)


def _all_runs(report: Report) -> Table:
    """A row for each run: its page, what it was, and what was measured."""
    rows = []
    for run in report.runs:
        address, name = report.link(run), "open" if run.keys else run.label
        page = Cell(name, link=address) if address else Cell("-" if run.keys else name)
        rows.append({"page": page, **run.keys, **page_row(run.result, SWEEP_PAGE)})
    if all(str(row["machine"]) == STEADY for row in rows):
        rows = [{heading: cell for heading, cell in row.items() if heading != "machine"} for row in rows]
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


def _heat_maps(report: Report) -> list[Mapping[str, str]]:
    """Numbers over two swept keys, for the first pairs of keys. Runs that differ in a third one are not averaged: each
    of its values has a map."""
    runs = report.runs
    swept = dict.fromkeys(key for run in runs for key in run.keys)
    axes = [key for key in swept if not {key, key.partition(".")[0]} & {*NO_AXES}]
    pairs = [(x, y) for x, y in itertools.combinations(axes, 2) if not _one_each(runs, x, y)]
    return [
        report.figure(
            f"heat_{value.split('/')[0]}_{x}_{y}",
            _said(what, x, y, panels.group_runs(runs, (x, y))),
            partial(panels.heat_maps, runs, x, y, value, what),
        )
        for x, y in pairs[:MOST_PAIRS]
        for value, what in HEAT_MAPS.items()
    ]


def _said(what: str, x: str, y: str, groups: Mapping[str, Sequence[StoredRun]]) -> str:
    """The caption of heat maps: what a cell holds."""
    told = f"{what.capitalize()} over {x} and {y}; an empty cell has no run."
    if len(groups) > 1:
        told += " Runs that differ in anything else are not averaged: one map for each of its values."
    if len(groups) > panels.MOST:
        told += f" The first {panels.MOST} of {len(groups)} maps."
    most = max(panels.largest_cell(group, x, y) for group in groups.values())
    return f"{told} n: so many runs of the same settings, averaged." if most > 1 else f"{told} A cell is one run."


def _panels(report: Report) -> None:
    """Small multiples: what a gamma gains, and beta by position, with a panel for each setting but gamma."""
    groups = panels.group_runs(report.runs, ("gamma",))
    more = f" The first {panels.MOST} of {len(groups)} settings." if len(groups) > panels.MOST else ""
    by_gamma = (
        "A panel for each setting but gamma, a line for each run: replay (solid) and Theorem 3.8 (dashed); dots are "
        f"what was measured, with 95 % intervals.{more}"
    )
    by_position = f"A panel for each setting but gamma, a line for each run, with 95 % intervals.{more}"
    drawn = report.figure("speedup_by_gamma", by_gamma, partial(panels.gamma_panels, groups))
    report.section("Which gamma", figures=[drawn])
    if any(run.result["beta_by_position"] for run in report.runs):
        drawn = report.figure("beta_by_position", by_position, partial(panels.beta_panels, groups))
        report.section("Beta by position", figures=[drawn])


def _one_each(runs: Sequence[StoredRun], x: str, y: str) -> bool:
    """Whether two keys move together, so that a map of them would be a diagonal."""
    cells = {(run.keys.get(x), run.keys.get(y)) for run in runs}
    return len(cells) <= max(len({cell[0] for cell in cells}), len({cell[1] for cell in cells}))
