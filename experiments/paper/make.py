"""A table or figure of the paper: printed numbers, what the formula gives, and ours, from the jobs of its sweep.

python -m specbench experiment=table1
python experiments/paper/make.py table1 outputs/table1

Without a folder, printed numbers and formulas alone.
"""

import argparse
import csv
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import measured

from specbench.contrib.paper.measured import OURS, our_rows
from specbench.contrib.paper.page import page, write
from specbench.errors import ConfigError
from specbench.results.reader import load_runs


def main() -> None:
    """Writes NAME.md, NAME.png and results.csv into the folder of a table or figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=[*OURS])
    parser.add_argument("folder", nargs="?", help="of the sweep, outputs/NAME")
    args = parser.parse_args()
    if args.folder is None:
        print(page(args.name, []))
        return
    try:
        runs = load_runs(Path(args.folder))
    except ConfigError as error:
        parser.error(str(error))
    folder = Path(__file__).resolve().parent / args.name
    print(write(args.name, runs, folder))
    rows = our_rows(args.name, runs)
    with (folder / "results.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    found = measured([], [run.result for run in runs])
    print(f"Machine: {found.machine}\nCommit: {found.commit}")


if __name__ == "__main__":
    main()
