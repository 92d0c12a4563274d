"""The table of a sweep: one row for each job, in summary.csv, in a terminal and on a page."""

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from specbench.results.fields import FIELDS, SUMMARY, metrics, values
from specbench.results.table import Cell, Table
from specbench.results.wording import WORDS, interval, number, unsteady, word

OVER = "over "  # a peer: how much faster speculative decoding is
ENGINE = ("tokens/s", "plain tokens/s", "of peak")
STEADY, UNSTEADY = "steady", "not steady"  # the machine
FIRST = ("speedup", "95 %", "lossless", "machine", "block efficiency", "alpha", "tokens/s", "processes",
         "plain tokens/s", "sd", "c", "v", "o", "Thm 3.8")  # the columns that stay if not all fit  # fmt: skip
Jobs = Sequence[tuple[list[str], Mapping[str, Any] | None]]


def own_words(jobs: Sequence[Sequence[str]]) -> list[dict[str, str]]:
    """The overrides of each job that not all have, as {"drafter": "ngram"}; all of them if there is one job."""
    common = set.intersection(*({*overrides} for overrides in jobs)) if len(jobs) > 1 else set()
    return [dict(o.split("=", 1) for o in overrides if o not in common and "=" in o) for overrides in jobs]


def multirun_rows(jobs: Jobs) -> list[dict[str, Any]]:
    """The rows of summary.csv: the overrides in which jobs differ, then the columns. A job without a result has only
    its overrides."""
    rows = []
    for words, (_, result) in zip(own_words([overrides for overrides, _ in jobs]), jobs, strict=True):
        row: dict[str, Any] = {**words, "lossless": "no result"}
        if result is not None:
            verdict = word(result["lossless"])
            row = {**words, **values(result, SUMMARY), "lossless": WORDS.get(verdict, verdict)}
            if result["machine"]:
                row["machine"] = "; ".join(unsteady(result)) or STEADY
            row |= {f"{OVER}{peer}": over["measured"] for peer, over in result["speedup_over"].items()}
            row |= metrics(result)
        rows.append(row)
    return rows


def multirun_tables(rows: Sequence[dict[str, Any]], title: str, file: str) -> list[Table]:
    """The rows for a terminal: the interval in one column, without the standard errors. Where peers were run, the
    engines have a table of their own. Columns that do not fit are those of the `file` alone."""
    shown = [_for_terminal(row) for row in rows]
    if any("95 %" in row and row["processes"] == "-" for row in shown):
        title += "; 95 %: of prompts, not of processes"
    names = [*dict.fromkeys(key for row in rows for key in takewhile(lambda key: key not in SUMMARY, row))]
    peers = list(dict.fromkeys(heading for row in shown for heading in row if heading.startswith(OVER)))
    left_out = {*ENGINE, *peers} if peers else set()
    if all(row.get("machine", STEADY) == STEADY for row in shown):
        left_out.add("machine")
    own = [{heading: cell for heading, cell in row.items() if heading not in left_out} for row in shown]
    tables = [Table.of(own, title, names, order=FIRST, elsewhere=file)]
    if peers:
        engines = [{head: row[head] for head in (*names, *ENGINE, *peers) if head in row} for row in shown]
        tables.append(Table.of(engines, "engines, tokens per second", names, order=peers, elsewhere=file))
    return tables


def _for_terminal(row: dict[str, Any]) -> dict[str, Any]:
    cells: dict[str, Any] = {}
    for name, value in row.items():
        if name == "low":
            cells["95 %"] = "too few" if value is None else f"{value:.2f}-{row['high']:.2f}"
        elif name == "machine":
            cells[name] = STEADY if value == STEADY else UNSTEADY
        elif name == "lossless":
            cells[name] = Cell(value, kind="" if value in ("yes", "no") else "bad")
        elif name not in ("high", "stderr"):
            digits = FIELDS[name].digits if name in FIELDS else 2 if name.startswith(OVER) else 3
            text = number(value, digits) if isinstance(value, float | None) else str(value)
            cells[FIELDS[name].head if name in FIELDS else name] = text
    return cells


def page_row(result: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """What a page's table of many runs has of one of them, without what names it: the speedup, the verdict, the
    machine, then the fields of these names."""
    speedup, verdict = result["speedup"], word(result["lossless"])
    kind = {"passed": "good", "lossy": ""}.get(verdict, "bad")
    row: dict[str, Any] = {
        "speedup": f"{speedup['measured']:.2f}x",
        "95 %": "too few" if speedup["ci95"] is None else interval(speedup["ci95"]),
        "lossless": Cell(WORDS.get(verdict, verdict), kind=kind),
        "machine": Cell(UNSTEADY, kind="bad") if unsteady(result) else STEADY,
    }
    row |= {FIELDS[name].head: number(FIELDS[name].of(result), FIELDS[name].digits) for name in names}
    row |= {f"{OVER}{peer}": number(over["measured"], 2) for peer, over in result["speedup_over"].items()}
    return row | {name: number(value, 3) for name, value in metrics(result).items()}
