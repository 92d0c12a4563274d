"""The sections of a page of many runs."""

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from specbench.results.reader import StoredRun
from specbench.results.report import figures
from specbench.results.report import sweep_figures as panels
from specbench.results.report.html_page import Report
from specbench.results.report.html_table import Cell, PageTable, without_empty
from specbench.results.report.run_sections import beam_search, of_the_paper, under_load
from specbench.results.schema import flatten
from specbench.results.tables import FACTORS, WORDS, at, interval, number, word
from specbench.run_config import Role, with_role

HEAT_MAPS = {"alpha/mean": "alpha", "speedup/measured": "measured speedup"}
# Settings, or their groups, that say how much is measured and what is kept: no axes of a map.
NO_AXES = (*with_role(Role.LABEL | Role.AMOUNT), "data.limit", "data.count")
MOST_PAIRS = 3  # of swept keys that have heat maps
NUMBERS = {  # of a run in a table: heading, (path in results.json, digits)
    "Thm 3.8": ("speedup/theorem_3_8", 2),
    "alpha": ("alpha/mean", 3),
    "stderr": ("alpha/stderr", 3),
    "block efficiency": ("block_efficiency/mean", 2),
    "c": ("cost/c", 3),
    "v": ("cost/v", 2),
    "o": ("cost/o", 2),
    "tokens/s": ("throughput/speculative_tokens_per_second", 1),
    "plain tokens/s": ("throughput/baseline_tokens_per_second", 1),
    "of peak": ("bandwidth/target_share_of_peak", 2),
    "processes": ("repeats/processes", 0),
}
LACKING = "The pages of runs that have none yet are written by python -m specbench.report FOLDER."
MEANINGS = {
    "speedup": "decoding alone, over plain decoding of the same prompts",
    "95 %": "a paired bootstrap over prompts, within one process unless the run repeated",
    "Thm 3.8": "from the run's own alpha, gamma and c",
    "block efficiency": "tokens per target call (tau)",
    "c": "a drafter step / a target step",
    "v": "a target call of a round / a target step",
    "o": "the rest of a round / a target step",
    "of peak": "bytes that a target step reads, over the measured peak",
}


def many_runs(report: Report, compared: bool = False) -> None:
    """Adds the sections of a sweep, or of the ways of a comparison, whose ranking comes before them."""
    runs = report.runs
    caption = "Speedup of every run; the diamond is Theorem 3.8 from the run's own alpha and c."
    if not all(run.result.get("repeats") for run in runs):
        caption += " Intervals are of one process, where a run did not repeat: another process may lie outside."
    measured = report.figure("predicted_and_measured", caption, lambda: figures.predicted_and_measured(runs))
    rows = [_row(report, run) for run in runs]
    if all(str(row["machine"]) == "steady" for row in rows):
        rows = [{heading: cell for heading, cell in row.items() if heading != "machine"} for row in rows]
    table = PageTable(without_empty(rows), sorts=True, notes=MEANINGS)
    lacking = [] if all(report.link(run) for run in runs) else [LACKING]
    report.section("All runs", texts=lacking, tables=[table])
    report.section("Measured and predicted", figures=[measured])
    factors = [row for run in runs if (row := _factors(run))]
    equal = {name for row in factors for name in row if all(other.get(name, "1.000") == "1.000" for other in factors)}
    factors = [{name: cell for name, cell in row.items() if name not in equal} for row in factors]
    caption = "They multiply to the measured speedup; those that are 1.000 in every run are left out."
    report.section("Why: the factors of every run", tables=[PageTable(factors, caption, sorts=len(factors) > 8)])
    if not compared and (maps := _heat_maps(report)):
        report.section("Over two keys at a time", figures=maps)
    _panels(report)
    caption = "A mean round of each run."
    drawn = report.figure("round_times", caption, lambda: figures.round_times(runs))
    report.section("Where the time goes", figures=[drawn])
    beam_search(report)
    under_load(report)
    of_the_paper(report)


def _row(report: Report, run: StoredRun) -> dict[str, Any]:
    """A run in the table of all: what it was, and what was measured."""
    result, address = run.result, report.link(run)
    name = "open" if run.keys else run.label
    row: dict[str, Any] = {"page": Cell(name, link=address) if address else Cell("-" if run.keys else name)}
    speedup = result["speedup"]
    row |= {**run.keys, "speedup": f"{speedup['measured']:.2f}x"}
    row["95 %"] = "too few" if speedup["ci95"] is None else interval(speedup["ci95"])
    found = word(result["lossless"])
    kind = {"passed": "good", "lossy": ""}.get(found, "bad")
    row["lossless"] = Cell(WORDS.get(found, found), kind=kind)
    unsteady = (result.get("machine") or {}).get("reasons")
    row["machine"] = Cell("not steady" if unsteady else "steady", kind="bad" if unsteady else "")
    row |= {heading: _digits(at(result, path), digits) for heading, (path, digits) in NUMBERS.items()}
    row |= {f"over {peer}": number(over["measured"], 2) for peer, over in result["speedup_over"].items()}
    return row | {name: _digits(value, 3) for name, value in flatten(result.get("metrics", {})).items()}


def _digits(value: Any, digits: int) -> str:
    return number(value, digits) if isinstance(value, int | float) else "-"


def _factors(run: StoredRun) -> dict[str, str]:
    """A run's accounting as a row; empty where nothing was drafted."""
    speedup = run.result["speedup"]
    if not speedup["accounting"]:
        return {}
    factors = {FACTORS.get(name, name): f"{entry['factor']:.3f}" for name, entry in speedup["accounting"].items()}
    return {"run": run.label, **factors, "measured": f"{speedup['measured']:.3f}"}


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
            _said(what, x, y, panels.split(runs, (x, y))),
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
    groups = panels.split(report.runs, ("gamma",))
    more = f" The first {panels.MOST} of {len(groups)} settings." if len(groups) > panels.MOST else ""
    by_gamma = (
        "A panel for each setting but gamma, a line for each run: replay (solid) and Theorem 3.8 (dashed); dots are "
        f"what was measured, with 95 % intervals.{more}"
    )
    by_position = f"A panel for each setting but gamma, a line for each run, with 95 % intervals.{more}"
    drawn = report.figure("speedup_by_gamma", by_gamma, partial(panels.speedup_by_gamma, groups))
    report.section("Which gamma", figures=[drawn])
    if any(run.result["beta_by_position"] for run in report.runs):
        drawn = report.figure("beta_by_position", by_position, partial(panels.beta_by_position, groups))
        report.section("Beta by position", figures=[drawn])


def _one_each(runs: Sequence[StoredRun], x: str, y: str) -> bool:
    """Whether two keys move together, so that a map of them would be a diagonal."""
    cells = {(run.keys.get(x), run.keys.get(y)) for run in runs}
    return len(cells) <= max(len({cell[0] for cell in cells}), len({cell[1] for cell in cells}))
