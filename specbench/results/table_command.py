"""`python -m specbench.table outputs/... [--by drafter] [--format latex]`: speedup and mean accepted tokens by
category, and how guesses were accepted, of finished runs, sweeps and comparisons.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from specbench.errors import ConfigError, answering

if TYPE_CHECKING:
    from specbench.results.reader import StoredRun
    from specbench.results.table import Table

SHOWN = ("speedup", "positions", "lengths", "classes", "entropy", "calibration", "times", "rows")
FORMS = ("text", "markdown", "latex", "csv")
RATIOS = ("measured", "end_to_end", "geometric_mean")


def table_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="specbench.table", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("folders", type=Path, nargs="+", help="of runs, sweeps or comparisons")
    parser.add_argument("--format", choices=FORMS, default="text")
    parser.add_argument("--by", metavar="KEYS", help="what a row is: run, category, or settings as in drafter,gamma; "
                        "runs with the same settings are pooled")  # fmt: skip
    parser.add_argument("--show", metavar="TABLES", help=f"some of {', '.join(SHOWN)}, or all: the default of one run "
                        "in text, else it is the first")  # fmt: skip
    parser.add_argument("--speedup", choices=RATIOS, default="measured", help="which one")
    parser.add_argument("--fold", metavar="NAME=A,B", action="append", default=[],
                        help="several categories as one; spec_bench folds the eight of MT-bench")  # fmt: skip
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Prints the tables; a mistake of the user's becomes one sentence and exit code 2."""
    args = table_parser().parse_args(arguments)
    with answering():
        if missing := [folder for folder in args.folders if not folder.is_dir()]:
            raise ConfigError(f"{missing[0]} is no folder: give folders of finished runs")
        from specbench.results.reader import load_runs  # loads torch

        runs = load_runs(*args.folders)
        shown = names_of(args.show, len(runs), args.format)
        tables = [table for name in shown for table in tables_of(name, runs, args)]
        if not tables:
            raise ConfigError(f"{args.folders[0]} has no such numbers")
        print_tables(tables, args.format)


def names_of(asked: str | None, runs: int, form: str) -> list[str]:
    """The tables that are wanted. Raises ConfigError."""
    if asked is None:
        return list(SHOWN) if runs == 1 and form == "text" else ["speedup"]
    names = list(SHOWN) if asked == "all" else asked.split(",")
    if unknown := [name for name in names if name not in SHOWN]:
        raise ConfigError(f"--show {unknown[0]} is not allowed: it must be all, or some of {', '.join(SHOWN)}")
    return names


def tables_of(name: str, runs: Sequence["StoredRun"], args: argparse.Namespace) -> list["Table"]:
    """One kind of table, of all runs. Raises ConfigError."""
    from specbench.results.acceptance_tables import TABLES
    from specbench.results.table_rows import names_of_runs

    if name == "speedup":
        return [speedups(runs, args)]
    found = []
    for run, names in zip(runs, names_of_runs(runs), strict=True):
        if (table := TABLES[name](run.result)) is not None:
            table.title += f": {' '.join(names.values())}" if len(runs) > 1 else ""
            found.append(table)
    return found


def speedups(runs: Sequence["StoredRun"], args: argparse.Namespace) -> "Table":
    """The table by category. Raises ConfigError."""
    from specbench.results.category_tables import SPEEDUPS, categories_table, entries_table, entry_table
    from specbench.results.table_rows import entries_of, folds_of, table_notes

    by = args.by or ("category" if len(runs) == 1 else "run")
    keys = [] if by in ("run", "category") else by.split(",")
    entries = entries_of(runs, keys, folds_of(args.fold))
    title = f"{SPEEDUPS[args.speedup]} over plain decoding; MAT: tokens per target call"
    if by == "category" and len(entries) == 1 and args.speedup == "measured":
        table = entry_table(entries[0], title)
    elif by == "category":
        table = categories_table(entries, title, args.speedup)
    else:
        table = entries_table(entries, title, args.speedup)
    table.notes += table_notes(runs, {key for entry in entries for key in entry.names})
    return table


def print_tables(tables: Sequence["Table"], form: str) -> None:
    """Prints tables. Raises ConfigError for several in one CSV."""
    from rich.text import Text

    from specbench.results.table import FORMATS
    from specbench.results.terminal import show

    if form == "csv" and len(tables) > 1:
        raise ConfigError(f"--format csv has one table, and these are {len(tables)}: choose one with --show")
    if form == "text":
        for table in tables:
            show(table, *(Text(f"note: {note}") for note in table.notes))
    else:
        print("\n\n".join(FORMATS[form](table).rstrip("\n") for table in tables))
