"""`python -m specbench.advise target.path=P`: whether to speculate, with what, and what it gains.

Drafters that are given, and those that need no training, are tried on each prompt in turn; ways that cannot win are
dropped, and the two fastest are measured on other prompts. batch_size and workload.rate may have several values.
"""

import argparse
import hashlib
import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from specbench.errors import ConfigError, answering, stop, visible
from specbench.results.terminal import show
from specbench.run.signals import exit_code, handled

MINUTES = 15.0
LONGEST = 10_000.0  # minutes
FOLDER = "hydra.run.dir="


def advise_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="specbench.advise", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("overrides", nargs="*", help="as of python -m specbench; batch_size=1,8 is two loads; "
                        "hydra.run.dir=D is the folder of the answer (outputs/advise/...)")  # fmt: skip
    parser.add_argument("--minutes", type=float, default=MINUTES, metavar="M",
                        help=f"what it may take, without loading ({MINUTES:g})")  # fmt: skip
    parser.add_argument("--only", action="store_true", help="try the drafters that are given, and no others")
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Runs the command; a mistake of the user's becomes one sentence and exit code 2."""
    args = advise_parser().parse_intermixed_args(arguments)
    try:
        with answering(), handled():
            if not 0 < args.minutes <= LONGEST:
                raise ConfigError(f"--minutes {args.minutes:g} is not allowed: above 0, and at most {LONGEST:g}")
            advise(args.overrides, args.minutes, args.only)
    except KeyboardInterrupt as error:
        stop(f"interrupted: {error}" if error.args else "interrupted: the same command goes on", exit_code())


def advise(overrides: Sequence[str], minutes: float, only: bool = False) -> Path:
    """Says what will be tried, measures what is missing, prints and writes the answers, and returns their folder.
    Raises ConfigError, or KeyboardInterrupt."""
    from specbench.contrib.advise.ways import command, on_unseen, trial

    show(Text("looking for what fits the target", style="dim"))
    given = [word for word in overrides if word.startswith(FOLDER)]
    words = [word for word in overrides if word not in given]
    tried = trial(words, only)
    from specbench.contrib.advise.answers import answer_sentence, crossings, load_answer
    from specbench.contrib.advise.driver import FILE, Driver, trial_lines
    from specbench.contrib.advise.page import answers_table, waits_table, write_advice
    from specbench.results.atomic_files import remove_half_written, write_json
    from specbench.results.folder_lock import locked
    from specbench.results.wording import duration

    digest = hashlib.sha256(" ".join(sorted([*words, *["--only"] * only])).encode()).hexdigest()[:8]
    folder = Path(given[-1].removeprefix(FOLDER) if given else f"outputs/advise/{digest}")
    show(*map(Text, trial_lines(tried, minutes)))
    with locked(folder):
        remove_half_written(folder, below=True)  # its runs have no locks
        state = Driver(tried, folder, 60 * minutes).go()
        kept = [(load, state["loads"][load.label]) for load in tried.loads]
        found = state["answers"] = [load_answer(load.label, own) for load, own in kept]
        for (load, own), each in zip(kept, found, strict=True):
            unseen = on_unseen(tried.common, own) if each["on"] else []
            alike = ["executor.programs=false"] if each.get("uncompiled") else []
            each["command"] = command([*unseen, *alike, *load.words], each["words"]) if unseen else ""
        leads = [*map(answer_sentence, found), *crossings(found)]
        write_json(folder / FILE, state)
        typed = [*overrides, "--minutes", f"{minutes:g}", *["--only"] * only]
        page = write_advice(folder, state, leads, shlex.join(["python", "-m", "specbench.advise", *typed]))
    show(answers_table(found), waits_table(found), *map(Text, leads))
    for each in found:
        told = [*filter(None, [each.get("more")]), *(each.get("notes") or ())]
        show(*(Text(f"{each['load']}: {text}", style="dim") for text in told))
        if each["command"]:
            print(visible(f"To measure that way on more prompts: {each['command']}"))
    print(f"it took {duration(state['seconds'])} in all, with loading")
    print(visible(f"written to {page} and {folder / FILE}"))
    return folder
