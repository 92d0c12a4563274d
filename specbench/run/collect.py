"""`python -m specbench.collect FOLDER FOLDER --into D`: parts of one data set, run apart, as one run."""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from specbench.errors import ConfigError, answering, first_line, shown
from specbench.report import files, terminal
from specbench.run.jobs import settings
from specbench.run.pooled import write_pooled
from specbench.run.run import locked

# Settings in which parts of one run may differ: which prompts, and how many processes there were.
OF_PARTS = ("skip", "take", "order", "repeats")


def main(words: Sequence[str] | None = None) -> None:
    """Pools runs that differ in nothing but which prompts they decoded."""
    parser = argparse.ArgumentParser(prog="python -m specbench.collect", description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, help="folders of finished runs, as with skip=0 and skip=40")
    parser.add_argument("--into", type=Path, required=True, metavar="D", help="the folder of the new run")
    args = parser.parse_args(words)
    with answering():
        terminal.summary(pool(args.folders, args.into).results, args.into)


def pool(folders: Sequence[Path], into: Path) -> files.Run:
    """Writes the run of several folders into one. Raises ConfigError if they are no parts of one run."""
    runs = [files.read_run(folder) for folder in folders]
    refuse_different(runs)
    own = re.compile(rf"({'|'.join(OF_PARTS)}|hydra\..*)=")
    overrides = [word for word in runs[0].results["details"]["overrides"] if not own.match(word)]
    config = runs[0].results["config"] | {"skip": 0, "take": 0}
    with locked(into):
        try:
            return write_pooled(into, runs, config, overrides=overrides)
        except (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:  # each is read, and yet
            raise ConfigError(f"{' and '.join(map(str, folders))} cannot be joined: {first_line(error)}") from error


def refuse_different(runs: Sequence[files.Run]) -> None:
    """Raises ConfigError if a run has other settings than the first."""
    first = settings(runs[0].results["config"], OF_PARTS)
    for run in runs[1:]:
        other = settings(run.results["config"], OF_PARTS)
        for key in dict.fromkeys([*first, *other]):
            if first.get(key) != other.get(key):
                raise ConfigError(
                    f"{run.folder} has {key}={shown(other.get(key))} and {runs[0].folder} {shown(first.get(key))}: "
                    f"runs are joined that differ in {', '.join(OF_PARTS)} alone"
                )
