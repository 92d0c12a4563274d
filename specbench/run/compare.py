"""`python -m specbench.compare drafter=stdlib,ngram`: methods, compared on each prompt in turn.

All jobs of the sweep run in this process: one target, one plain decoding for all that can share it, and each prompt
decoded by all methods before the next one. Jobs that do other work (another target, data, temperature or batch size)
are compared among themselves.
"""

import argparse
import json
import logging
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.utils import configure_log
from hydra.types import RunMode
from omegaconf import DictConfig, open_dict

from specbench.config.compose import compose, fields, loader
from specbench.errors import CommandError, ConfigError, answering, first_line
from specbench.report import files
from specbench.report.files import Run, labels_of
from specbench.run.command import interruptible
from specbench.run.jobs import HOW, Job, alike, finished_job
from specbench.run.sweep import jobs_of

log = logging.getLogger(__name__)


def main(words: list[str] | None = None, preset: Sequence[str] = (), about: str | None = __doc__) -> None:
    """Runs the command, which is `about` something; `preset` are overrides that the words may replace."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="specbench", description=about, formatter_class=form)
    parser.add_argument("inputs", nargs="*" if preset else "+", help="a sweep, as of -m")
    more = 'the same with these overrides too, as in "gamma=2,3"'
    parser.add_argument("--also", metavar="OVERRIDES", action="append", default=[], help=more)
    args = parser.parse_intermixed_args(words)
    with answering(), interruptible():
        compare_jobs([*preset, *args.inputs], args.also)


def advise(words: list[str] | None = None) -> None:
    """`python -m specbench.advise target.path=P`: whether to speculate, with which drafter, at which batch size, by
    comparisons of plain decoding with drafters that need no training, and with those that are given."""
    given = sys.argv[1:] if words is None else words
    keys = {word.partition("=")[0].partition(".")[0] for word in given}
    # The default drafter has another tokenizer than most targets.
    fitting = ["drafter=suffix,prompt_lookup"] if "target" in keys and "drafter" not in keys else []
    main(given, ["experiment=advise", *fitting], advise.__doc__)


def compare_jobs(words: Sequence[str], also: Sequence[str]) -> None:
    """Decodes with all jobs of a sweep, with those of `also` too, and compares them. Raises ConfigError."""
    config, folder, jobs = jobs_of_comparison(words, also)
    together = alike(jobs, HOW)
    if all(len(own) < 2 for own in together):
        raise ConfigError(f"{' '.join(words)} is one method for each work: give several, as in drafter=stdlib,ngram")
    folder.mkdir(parents=True, exist_ok=True)
    with open_dict(config):
        config.hydra.runtime.output_dir = str(folder)
    configure_log(config.hydra.job_logging, False)
    missing = 0
    for label, own in zip(labels_of_groups(together), together, strict=True):
        if len(together) > 1:
            print(f"\n{label}", flush=True)
        missing += compare_group(folder / fields(label) if len(together) > 1 else folder, own)
    if len(together) > 1:
        from specbench.report.several import write_page

        write_page(folder)
    if missing:
        raise CommandError(f"{missing} of {len(jobs)} methods have no results, see run.log in {folder}")


def jobs_of_comparison(words: Sequence[str], also: Sequence[str]) -> tuple[DictConfig, Path, list[Job]]:
    """The composed configuration, the folder of the comparison, and its checked jobs, each once. Raises ConfigError."""
    words = [*words]
    keys = {word.partition("=")[0] for word in words}
    words += [] if keys & {"name", "experiment"} else ["name=compare"]
    jobs: dict[Path, Job] = {}
    for more in ([], *map(shlex.split, also)):
        replaced = {word.partition("=")[0] for word in more}
        own = [word for word in words if word.partition("=")[0] not in replaced]
        config = compose([*own, *more], RunMode.MULTIRUN)
        if not more:
            first = config
            named = [word for word in (*words, *also) if not word.startswith(("name=", "logger", "force=", "hydra."))]
            folder = Path(config.hydra.sweep.dir) / fields(",".join(named))
        for job in jobs_of(config, loader(), folder, "method"):
            jobs.setdefault(job.folder, job)
    if any(job.checked.root.repeats > 1 for job in jobs.values()):
        raise ConfigError("repeats is not possible in a comparison, whose methods share a process: leave it out")
    return first, folder, list(jobs.values())


def labels_of_groups(together: Sequence[Sequence[Job]]) -> list[str]:
    """What distinguishes groups of jobs: of the overrides that all jobs of a group have, those that not all have."""
    shared = [[word for word in own[0].overrides if all(word in job.overrides for job in own)] for own in together]
    labels = labels_of(shared)
    return [label if labels.count(label) == 1 else f"group {number}" for number, label in enumerate(labels, 1)]


def compare_group(folder: Path, asked: Sequence[Job]) -> int:
    """Decodes with jobs that do the same work, in folders below this one, unless all have been decoded in turn before;
    prints and writes the comparison. Returns how many jobs have no results. Raises KeyboardInterrupt after Ctrl-C."""
    from specbench.run.provenance import forget_earlier_runs
    from specbench.run.run import execute

    labels = labels_of([job.overrides for job in asked])
    jobs = [replace(job, folder=folder / fields(label)) for job, label in zip(asked, labels, strict=True)]
    force = any(job.checked.root.force for job in jobs)
    known = [before for job in jobs if (before := finished_job(job)) is not None]
    found: Sequence[Run | Exception] = known
    started = {run.results["provenance"]["started"] for run in known}  # one, if a process decoded all in turn
    if force or len(known) < len(jobs) or len(started) > 1:
        forget_earlier_runs()
        found = execute(jobs, announce=print)
    else:
        print("finished before (force=true decodes again)")
    named = []
    for run, label in zip(found, labels, strict=True):
        if isinstance(run, Run):
            named.append(replace(run, label=label))
        else:
            log.warning("%s has no results: %s", label, first_line(run))
    if named:
        write_comparison(folder, named)
    if any(run.results["status"] == "interrupted" for run in named):
        raise KeyboardInterrupt(f"the numbers of what was finished are in {folder}")
    return len(jobs) - len(named)


def write_comparison(folder: Path, runs: Sequence[Run]) -> None:
    """Prints the ranking, and writes comparison.json and the page. Raises ConfigError if the runs share no prompt."""
    from specbench.measure.compare import compare
    from specbench.report import several, terminal

    try:
        rows = compare({run.label: run.records for run in runs})
    except ValueError as error:
        raise ConfigError(str(error)) from error
    content: dict[str, Any] = {"schema_version": runs[0].results["schema_version"], "kind": "comparison", "rows": rows}
    files.write_text(folder / files.COMPARISON, json.dumps(content, indent=1, allow_nan=False))
    files.write_text(folder / files.PAGE, several.comparison_page(rows, runs, folder.name))
    headline = several.compared_headline(rows) + terminal.baseline_strength(runs[0].results)
    several.answer(headline, runs, several.comparison(rows), folder)
