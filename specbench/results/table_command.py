"""`python -m specbench.table outputs/... [--by drafter] [--columns tau,alpha,p] [--format latex]`: chosen numbers, or
speedup and block efficiency by category, and how guesses were accepted, of finished runs, sweeps and comparisons.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from specbench.errors import ConfigError, answering, refuse_missing_folders
from specbench.results.acceptance_tables import TABLES
from specbench.results.category_tables import (
    SPEEDUPS,
    TAU,
    categories_table,
    entries_of,
    entries_table,
    folds_of,
    names_of_runs,
    table_notes,
)
from specbench.results.column_tables import USUAL, P, columns_table, named_columns
from specbench.results.reader import StoredRun, load_runs
from specbench.results.table import FORMATS, Table
from specbench.results.terminal import show

SHOWN = ("speedup", *TABLES)


def table_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="specbench.table", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("folders", type=Path, nargs="+", help="of runs, sweeps or comparisons")
    parser.add_argument("--format", choices=("text", *FORMATS), default="text")
    parser.add_argument("--by", metavar="KEYS", help="what a row is: run, category, or settings as in drafter,gamma; "
                        "runs with the same settings are pooled")  # fmt: skip
    parser.add_argument("--show", metavar="TABLES", help=f"some of {', '.join(SHOWN)}, or all: the default of one run "
                        "in text, else it is the first")  # fmt: skip
    parser.add_argument("--columns", metavar="NAMES", help="numbers of a row, instead of categories: columns of "
                        "summary.csv and the like, as in tau,alpha,speedup; p compares with the first row")  # fmt: skip
    parser.add_argument("--across", metavar="KEY", help="a setting whose values are groups of columns, as temperature")
    parser.add_argument("--speedup", choices=SPEEDUPS, default="measured", help="which one")
    parser.add_argument("--fold", metavar="NAME=A,B", action="append", default=[],
                        help="several categories as one; spec_bench folds the eight of MT-bench")  # fmt: skip
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Prints the tables; a mistake of the user's becomes one sentence and exit code 2."""
    args = table_parser().parse_args(arguments)
    with answering():
        refuse_missing_folders(map(str, args.folders))
        runs = load_runs(*args.folders)
        names = names_of(args.show, len(runs), args.format, bool(args.columns or args.across))
        tables = [table for name in names for table in tables_of(name, runs, args) if table.rows]
        if not tables:
            raise ConfigError(f"{args.folders[0]} has no such numbers")
        print_tables(tables, args.format)


def names_of(asked: str | None, runs: int, form: str, chosen: bool = False) -> list[str]:
    """The tables that are wanted; `chosen` is whether columns are. Raises ConfigError."""
    if asked is None:
        return list(SHOWN) if runs == 1 and form == "text" and not chosen else ["speedup"]
    names = list(SHOWN) if asked == "all" else asked.split(",")
    if unknown := [name for name in names if name not in SHOWN]:
        raise ConfigError(f"--show {unknown[0]} is not allowed: it must be all, or some of {', '.join(SHOWN)}")
    return names


def tables_of(name: str, runs: Sequence[StoredRun], args: argparse.Namespace) -> list[Table]:
    """One kind of table, of all runs. Raises ConfigError."""
    if name == "speedup":
        return [columns_of(runs, args) if args.columns or args.across else speedups(runs, args)]
    tables = [TABLES[name](run.result) for run in runs]
    for table, names in zip(tables, names_of_runs(runs), strict=True):
        table.title += f": {' '.join(names.values())}" * (len(runs) > 1)
    return tables


def speedups(runs: Sequence[StoredRun], args: argparse.Namespace) -> Table:
    """The table by category. Raises ConfigError."""
    by = args.by or ("category" if len(runs) == 1 else "run")
    entries = entries_of(runs, [] if by in ("run", "category") else by.split(","), folds_of(args.fold))
    title = f"{SPEEDUPS[args.speedup]} over plain decoding; {TAU.head}: {TAU.about}"
    table = (categories_table if by == "category" else entries_table)(entries, title, args.speedup)
    table.notes += table_notes(runs, {key for entry in entries for key in entry.names})
    return table


def columns_of(runs: Sequence[StoredRun], args: argparse.Namespace) -> Table:
    """The table of `--columns` and `--across`. Raises ConfigError."""
    names = named_columns(args.columns or USUAL)
    if args.by == "category" or args.fold or args.speedup != "measured":
        raise ConfigError("--columns and --across are not possible with --by category, --fold or --speedup: choose "
                          "end_to_end or geometric_mean as a column, or leave them out")  # fmt: skip
    by = [] if args.by in (None, "run") else args.by.split(",")
    if args.across:
        own = [key for key in by or (name for run in runs for name in run.keys) if key != args.across]
        by = [*dict.fromkeys(own or ["drafter"]), args.across]
    entries = entries_of(runs, by, {})
    table = columns_table(entries, names, args.across or "")
    told = {key for entry in entries for key in entry.names if P not in names or key == args.across}
    table.notes += table_notes(runs, told)
    return table


def print_tables(tables: Sequence[Table], form: str) -> None:
    """Prints tables. Raises ConfigError for several in one CSV."""
    if form == "csv" and len(tables) > 1:
        raise ConfigError(f"--format csv has one table, and these are {len(tables)}: choose one with --show")
    if form == "text":
        for table in tables:
            show(table, *(Text(f"note: {note}") for note in table.notes))
    else:
        print("\n\n".join(FORMATS[form](table).rstrip("\n") for table in tables))
