"""`python -m specbench.collect outputs/NAME`: makes the summary of a sweep from the folders of its jobs.

It writes summary.csv, prints the table, draws the page, and gives the table to the sweep's logger. Nothing is decoded.
For a sweep whose command has ended before its jobs, or whose folder was copied from a cluster.
"""

import argparse
from pathlib import Path

from specbench.errors import ConfigError, answering, stop


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="specbench.collect", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("folder", type=Path, help="of a sweep")
    parser.add_argument("--all", action="store_true", help="of every command in the folder, not only of the last one")
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Prints the table; a mistake of the user's becomes one sentence and exit code 2. The code is 1 if a job has no
    result, 3 if the verdict of one with strict=true is not good."""
    args = parser().parse_args(arguments)
    with answering():
        if not args.folder.is_dir():
            raise ConfigError(f"{args.folder} is no folder: give that of a sweep, outputs/NAME")
        from specbench.contrib.cluster.job_list import lists_in
        from specbench.run.sweep_summary import summarise  # loads much

        lists = lists_in(args.folder)
        answers = [summarise(jobs, redraw=True) for jobs in (lists if args.all else lists[-1:])]
        if bad := [(sentence, code) for sentence, code in answers if code]:
            stop(*bad[-1])
