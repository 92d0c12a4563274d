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
            row |= {f"{OVER}{peer}": over["measured"] for peer, over in result["speedup_over"].items()} | metrics(
                result
            )
        rows.append(row)
    return rows


def multirun_tables(rows: Sequence[dict[str, Any]], title: str, file: str) -> list[Table]:
    """The rows for a terminal: the interval in one column, without the standard errors. Where peers were run, the
    engines have a table of their own. Columns that do not fit are those of the `file` alone."""
    shown = [_for_terminal(row) for row in rows]
    if all(str(row.get("machine")) != UNSTEADY for row in shown):
        shown = [{key: cell for key, cell in row.items() if key != "machine"} for row in shown]
    if any("95 %" in row and row.get("processes", "-") == "-" for row in shown):
        title += "; 95 %: of one process"
    headings = list(dict.fromkeys(key for row in shown for key in row))
    peers = [heading for heading in headings if heading.startswith(OVER)]
    engine = [*ENGINE, *peers] if peers else []
    names = [*dict.fromkeys(key for row in rows for key in takewhile(lambda key: key not in SUMMARY, row))]
    found = [
        Table.of(_only(shown, [h for h in headings if h not in engine]), title, names, order=FIRST, elsewhere=file)
    ]
    if peers:
        engines = _only(shown, [*names, *engine])
        found.append(Table.of(engines, "engines, tokens per second", names, order=peers, elsewhere=file))
    return found


def _only(rows: Sequence[dict[str, Any]], headings: Sequence[str]) -> list[dict[str, Any]]:
    return [{heading: row[heading] for heading in headings if heading in row} for row in rows]


def _for_terminal(row: dict[str, Any]) -> dict[str, Any]:
    cells: dict[str, Any] = {}
    for name, value in row.items():
        if name == "low":
            cells["95 %"] = "too few" if value is None else f"{value:.2f}-{row['high']:.2f}"
        elif name == "machine":
            cells[name] = STEADY if value == STEADY else UNSTEADY
        elif name == "lossless":
            cells[name] = Cell(str(value), kind="" if value in ("yes", "no") else "bad")
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
    for name in names:
        row[FIELDS[name].head] = number(FIELDS[name].of(result), FIELDS[name].digits)
    row |= {f"{OVER}{peer}": number(over["measured"], 2) for peer, over in result["speedup_over"].items()}
    return row | {name: number(value, 3) for name, value in metrics(result).items()}
