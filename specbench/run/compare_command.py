"""`python -m specbench.compare drafter=stdlib,ngram`: ways of decoding, compared on each prompt in turn.

With overrides, every job of the sweep runs in this process: one target, one plain decoding for all that can share it,
each prompt decoded in all ways before the next one. With folders, finished runs are compared on the prompts they share.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.errors import ConfigError, stop, visible
from specbench.run.signals import exit_code, handled

if TYPE_CHECKING:
    from specbench.run.sweep import Sweep

NAME = "compare"  # of the folder in outputs/, unless a name or an experiment is given


def comparison_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="specbench.compare", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("inputs", nargs="+", help="a sweep, as of python -m specbench -m, or folders of finished runs")
    parser.add_argument("-m", "--multirun", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--also", metavar="OVERRIDES", action="append", default=[],
                        help='the same with these overrides too, as in "gamma=2,3"')  # fmt: skip
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Runs the command; a mistake of the user's becomes one sentence and exit code 2."""
    args = comparison_parser().parse_intermixed_args(arguments)
    inputs = args.inputs
    try:
        with handled():
            of_folders = any(Path(i).is_dir() for i in inputs)
            if missing := [i for i in inputs if of_folders and not Path(i).is_dir()]:
                raise ConfigError(f"{missing[0]} is no folder: give folders of finished runs alone, or overrides alone")
            if of_folders and args.also:
                raise ConfigError("--also cannot apply to runs that are over: leave it out")
            code = compare_folders(inputs) if of_folders else compare_sweep(inputs, args.also)
    except ConfigError as error:
        stop(str(error), 2)
    except KeyboardInterrupt as error:
        stop(f"interrupted: {error}" if error.args else "interrupted before anything was finished", exit_code())
    sys.exit(code)


def compare_folders(folders: Sequence[str]) -> int:
    """Compares finished runs with the first one. Raises ConfigError."""
    from specbench.results.comparison_tables import sentence, tables
    from specbench.results.parquet import load_sums
    from specbench.results.reader import load_runs
    from specbench.results.sweep_table import own_words
    from specbench.results.terminal import show
    from specbench.run.compare import differences_in_work, lead
    from specbench.run.jobs import labels_of
    from specbench.stats.comparison import SPEEDUP, TOKENS_PER_SECOND, compare

    stored = {run.folder: run for folder in folders for run in load_runs(Path(folder))}
    if len(stored) < 2:
        raise ConfigError(f"{folders[0]} holds one run: give two or more folders")
    words = own_words([run.result.get("overrides") or [] for run in stored.values()])
    labels = labels_of(words)
    if len({*labels}) < len(labels):
        words, labels = [{"run": str(folder)} for folder in stored], [str(folder) for folder in stored]
    runs = dict(zip(labels, stored.values(), strict=True))
    together = [run.result.get("in_turn") for run in runs.values()]
    by = TOKENS_PER_SECOND if together[0] and all(way == together[0] for way in together) else SPEEDUP
    compared = compare({label: load_sums(run.folder) for label, run in runs.items()}, by, labels[0])
    show(lead({"task": {}, **asdict(compared)}, {label: run.result for label, run in runs.items()}))
    show(*tables(compared, dict(zip(labels, words, strict=True)), ""))
    for warning in differences_in_work(runs):
        print(visible(f"note: {warning}"))
    if len(runs) == 2:
        print(visible(sentence(compared)))
    return 0


def compare_sweep(overrides: Sequence[str], also: Sequence[str] = ()) -> int:
    """Runs the jobs of a sweep in turn and compares them; `also` are overrides of further ones. Returns the exit code.
    Raises ConfigError."""
    from hydra.core.utils import configure_log
    from omegaconf import open_dict
    from rich.text import Text

    config, sweep = expected(overrides, also)
    jobs = sweep.jobs
    if len(jobs) < 2:
        raise ConfigError(f"{' '.join(overrides)} is one way of decoding: give several, as in drafter=stdlib,ngram")
    for key in ("repeats", "workers"):
        if any(getattr(job.checked.root, key) > 1 for job in jobs):
            raise ConfigError(f"{key} is not possible with specbench.compare, whose ways share a process: leave it out")
    sweep.folder.mkdir(parents=True, exist_ok=True)
    with open_dict(config):
        config.hydra.runtime.output_dir = str(sweep.folder)
    configure_log(config.hydra.job_logging, False)

    from specbench.results.terminal import show
    from specbench.run.compare import is_finished, notes_on_comparison, run_jobs, show_comparison

    status = "complete"
    if is_finished(jobs) and not any(job.checked.root.force for job in jobs):
        show(Text("finished before: the files are compared again (force=true decodes again)", style="dim"))
    else:
        status = run_jobs(jobs, lambda text: show(Text(text, style="dim")))
    summary, code = sweep.summarise(printed=False, page=False)
    show_comparison(sweep.folder, jobs)
    for warning in notes_on_comparison(jobs):
        show(Text(f"note: {warning}"))
    if status == "interrupted":
        raise KeyboardInterrupt(f"what was finished is in {sweep.folder}")
    if code or status == "incomplete":
        stop(summary if code else "a way has no results: see run.log", code or 1)
    return 0


def expected(overrides: Sequence[str], also: Sequence[str] = ()) -> tuple[Any, "Sweep"]:
    """The composed configuration and its sweep, whose jobs have been checked; a job that is asked for twice comes once.
    Raises ConfigError."""
    from specbench.config.compose import compose_sweep, own_hydra
    from specbench.config.paths import fields
    from specbench.run.sweep import Sweep, name_of_command

    keys = {override.partition("=")[0] for override in overrides}
    words = list(overrides) if keys & {"name", "experiment"} else [*overrides, f"name={NAME}"]
    sweep, configs = Sweep(), []
    with own_hydra():
        for more in ([], *map(shlex.split, also)):
            replaced = {word.partition("=")[0] for word in more}
            configs.append(compose_sweep([*(word for word in words if word.partition("=")[0] not in replaced), *more]))
            sweep.expect_all(configs[-1])
    sweep.command = fields("+".join([name_of_command(configs[0]), *also]))
    sweep.jobs = list({str(job.folder): job for job in sweep.jobs}.values())
    return configs[0], sweep
