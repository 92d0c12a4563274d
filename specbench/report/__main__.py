"""`python -m specbench.report FOLDER`: the page and the tables of a finished run, sweep or comparison."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from specbench.errors import ConfigError, answering
from specbench.report import files


def main(words: Sequence[str] | None = None) -> None:
    """Writes page.html into the folder, or prints the tables in another format."""
    parser = argparse.ArgumentParser(prog="python -m specbench.report", description=__doc__)
    parser.add_argument("folder", type=Path, help="the folder of a run, or one with several below it")
    parser.add_argument(
        "--format",
        choices=("html", "markdown", "latex", "csv"),
        default="html",
        help="html writes page.html, the others print",
    )
    parser.add_argument("--wandb", metavar="ENTITY/PROJECT", help="also makes a dashboard there; needs an account")
    args = parser.parse_args(words)
    with answering():
        if not args.folder.is_dir():
            raise ConfigError(f"{args.folder} is no folder: give the folder of a finished run")
        if args.format == "html":
            from specbench.report.several import write_page

            print(write_page(args.folder))
        else:
            print_tables(args.folder, args.format)
        if args.wandb:
            from specbench.report.wandb import save_dashboard

            print(save_dashboard(args.wandb, files.read_all(args.folder)))


def print_tables(folder: Path, form: str) -> None:
    """Prints the tables of a folder as Markdown or LaTeX, or what summary.csv has. Raises ConfigError."""
    from specbench.report import several, tables

    runs = files.read_all(folder)
    if form == "csv":
        print(several.sweep_csv(runs).to_csv(index=False), end="")
        return
    compared = files.read_comparison(folder) if (folder / files.COMPARISON).is_file() else []
    for table in (several.comparison(compared), several.runs_table(runs), tables.by_category(runs)):
        if len(table):
            print(several.written(table, form))


if __name__ == "__main__":
    main()
