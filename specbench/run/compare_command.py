"""`python -m specbench.compare drafter=stdlib,ngram`: ways of decoding, compared on each prompt in turn.

With overrides, every job of the sweep runs in this process: one target, one plain decoding for all that can share it,
each prompt decoded in all ways before the next one. With folders, finished runs are compared on the prompts they share.
"""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.errors import ConfigError, answering, stop
from specbench.run.signals import exit_code, handled

if TYPE_CHECKING:
    from specbench.run.sweep import Sweep

NAME = "compare"  # of the folder in outputs/, unless a name or an experiment is given
ALONE = 'Give what one way alone has with that way, as in --also "drafter=model drafter.path=Q".'


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
    folders = [entry for entry in args.inputs if Path(entry).is_dir()]
    try:
        with answering(), handled():
            if not folders:
                compare_sweep(args.inputs, args.also)
                return
            if missing := [entry for entry in args.inputs if entry not in folders]:
                raise ConfigError(f"{missing[0]} is no folder: give folders of finished runs alone, or overrides alone")
            if args.also:
                raise ConfigError("--also cannot apply to runs that are over: leave it out")
            from specbench.run.compare import compare_folders

            compare_folders(folders)
    except KeyboardInterrupt as error:
        stop(f"interrupted: {error}" if error.args else "interrupted before anything was finished", exit_code())


def compare_sweep(overrides: Sequence[str], also: Sequence[str] = ()) -> None:
    """Runs the jobs of a sweep in turn and compares them; `also` are overrides of further ones. Raises ConfigError."""
    from hydra.core.utils import configure_log
    from omegaconf import open_dict

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

    from specbench.results.console import info
    from specbench.run.compare import is_finished, run_jobs, show_comparison

    status = "complete"
    if is_finished(jobs) and not any(job.checked.root.force for job in jobs):
        info("finished before: the files are compared again (force=true decodes again)")
    else:
        status = run_jobs(jobs, info)
    summary, code = sweep.summarise(printed=False, page=False)
    show_comparison(sweep.folder, jobs)
    if status == "interrupted":
        raise KeyboardInterrupt(f"what was finished is in {sweep.folder}")
    if code or status == "incomplete":
        stop(summary if code else "a way has no results: see run.log", code or 1)


def expected(overrides: Sequence[str], also: Sequence[str] = ()) -> tuple[Any, "Sweep"]:
    """The composed configuration and its sweep, whose jobs have been checked; a job that is asked for twice comes once.
    Raises ConfigError."""
    from specbench.config.compose import compose_sweep, loader
    from specbench.config.default_drafter import with_drafter
    from specbench.config.paths import fields
    from specbench.results.terminal import show
    from specbench.run.sweep import Sweep, name_of_command

    overrides = overrides if "drafter" in " ".join(also) else with_drafter(overrides, show)
    keys = {override.partition("=")[0] for override in overrides}
    words = list(overrides) if keys & {"name", "experiment"} else [*overrides, f"name={NAME}"]
    sweep, configs = Sweep(), []
    by = loader()
    for more in ([], *map(shlex.split, also)):
        replaced = {word.partition("=")[0] for word in more}
        own = [word for word in words if word.partition("=")[0] not in replaced]
        configs.append(compose_sweep([*own, *more], by))
        sweep.expect_all(configs[-1], hint=ALONE, by=by)
    sweep.command = fields("+".join([name_of_command(configs[0]), *also]))
    sweep.jobs = list({str(job.folder): job for job in sweep.jobs}.values())
    return configs[0], sweep
