"""`python -m specbench.compare drafter=stdlib,ngram`: methods, compared on each prompt in turn.

With overrides, all jobs of the sweep run in this process: one target, one plain decoding for all that can share it, and
each prompt decoded by all methods before the next one. Jobs that do other work (another target, data, temperature or
batch size) are compared among themselves. With folders, finished runs are compared on the prompts that they share.
"""

import argparse
import logging
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.utils import configure_log
from omegaconf import DictConfig, open_dict

from specbench.config.compose import compose_sweep, fields, loader
from specbench.errors import ConfigError, answering, first_line, stop
from specbench.run.command import interruptible
from specbench.run.jobs import HOW, alike
from specbench.run.sweep import jobs_of

if TYPE_CHECKING:
    from specbench.report.files import Run
    from specbench.run.jobs import Job

log = logging.getLogger(__name__)


def main(words: list[str] | None = None, preset: Sequence[str] = ()) -> None:
    """Runs the command; `preset` are overrides that the words may replace."""
    parser = argparse.ArgumentParser(prog="specbench.compare", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("inputs", nargs="*" if preset else "+", help="a sweep, as of -m, or folders of finished runs")
    parser.add_argument("--also", metavar="OVERRIDES", action="append", default=[],
                        help='the same with these overrides too, as in "gamma=2,3"')  # fmt: skip
    args = parser.parse_intermixed_args(words)
    with answering(), interruptible():
        folders = [Path(entry) for entry in args.inputs if Path(entry).is_dir()]
        if not folders:
            compare_jobs([*preset, *args.inputs], args.also)
            return
        missing = [entry for entry in args.inputs if Path(entry) not in folders]
        if missing or args.also:
            other = f"{missing[0]} is no folder" if missing else "--also cannot apply to runs that are over"
            raise ConfigError(f"{other}: give folders of finished runs alone, or overrides alone")
        compare_folders(folders)


def advise(words: list[str] | None = None) -> None:
    """`python -m specbench.advise`: whether to speculate, with which drafter and gamma, at which batch size."""
    given = sys.argv[1:] if words is None else words
    keys = {word.partition("=")[0].partition(".")[0] for word in given}
    # The default drafter has another tokenizer than most targets.
    fitting = ["drafter=suffix,prompt_lookup"] if "target" in keys and "drafter" not in keys else []
    main(given, ["experiment=advise", *fitting])


def compare_jobs(words: Sequence[str], also: Sequence[str]) -> None:
    """Decodes with all jobs of a sweep, with those of `also` too, and compares them. Raises ConfigError."""
    config, folder, jobs = jobs_of_comparison(words, also)
    together = alike(jobs, HOW)
    if all(len(own) < 2 for own in together):
        raise ConfigError(f"{' '.join(words)} is one method: give several, as in drafter=stdlib,ngram")
    folder.mkdir(parents=True, exist_ok=True)
    with open_dict(config):
        config.hydra.runtime.output_dir = str(folder)
    configure_log(config.hydra.job_logging, False)
    labels = [""] if len(together) == 1 else labels_of_groups(together)
    missing = 0
    for label, own in zip(labels, together, strict=True):
        place = folder / fields(label) if label else folder
        if label:
            print(f"\n{label}", flush=True)
        missing += compare_group(place, own)
    if len(together) > 1:
        from specbench.report.command import write_page

        write_page(folder)
    if missing:
        stop(f"{missing} of {len(jobs)} methods have no results, see run.log in {folder}", 1)


def jobs_of_comparison(words: Sequence[str], also: Sequence[str]) -> "tuple[DictConfig, Path, list[Job]]":
    """The composed configuration, the folder of the comparison, and its checked jobs, each once. Raises ConfigError."""
    words = [*words]
    keys = {word.partition("=")[0] for word in words}
    words += [] if keys & {"name", "experiment"} else ["name=compare"]
    by = loader()
    jobs: dict[Path, Job] = {}
    for more in ([], *map(shlex.split, also)):
        replaced = {word.partition("=")[0] for word in more}
        own = [word for word in words if word.partition("=")[0] not in replaced]
        config = compose_sweep([*own, *more], by)
        if not more:
            first = config
            named = [word for word in (*words, *also) if not word.startswith(("name=", "logger", "force=", "hydra."))]
            folder = Path(config.hydra.sweep.dir) / fields(",".join(named))
        for job in jobs_of(config, by, folder, "method"):
            jobs.setdefault(job.folder, job)
    if any(job.checked.root.repeats > 1 for job in jobs.values()):
        raise ConfigError("repeats is not possible in a comparison, whose methods share a process: leave it out")
    return first, folder, list(jobs.values())


def labels_of_groups(together: "Sequence[Sequence[Job]]") -> list[str]:
    """What distinguishes groups of jobs: the overrides that all jobs of a group have, and not all groups."""
    common = [set.intersection(*(set(job.overrides) for job in own)) for own in together]
    everywhere = set.intersection(*common)
    found = []
    for number, (own, shared) in enumerate(zip(together, common, strict=True)):
        label = ", ".join(word for word in own[0].overrides if word in shared and word not in everywhere)
        found.append(label if label and label not in found else f"group {number + 1}")
    return found


def compare_group(folder: Path, asked: "Sequence[Job]") -> int:
    """Decodes with jobs that do the same work, in folders below this one, unless all have been decoded in turn before;
    prints and writes the comparison. Returns how many jobs have no results. Raises KeyboardInterrupt after Ctrl-C."""
    from specbench.report.files import Run, labels_of
    from specbench.run.provenance import forget_earlier_runs
    from specbench.run.run import execute
    from specbench.run.stored import finished

    labels = labels_of([job.overrides for job in asked])
    jobs = [replace(job, folder=folder / fields(label)) for job, label in zip(asked, labels, strict=True)]
    force = any(job.checked.root.force for job in jobs)
    runs: list[Run | Exception | None] = [finished(job.folder, job.checked.resolved) for job in jobs]
    if force or not in_turn(runs):
        forget_earlier_runs()
        runs = [*execute(jobs, announce=print)]
    else:
        print("finished before (force=true decodes again)")
    named = [
        Run(run.folder, run.results, label) for run, label in zip(runs, labels, strict=True) if isinstance(run, Run)
    ]
    for run, label in zip(runs, labels, strict=True):
        if isinstance(run, Exception):
            log.warning("%s has no results: %s", label, first_line(run))
    if named:
        write_comparison(folder, named)
    if any(run.results["status"] == "interrupted" for run in named):
        raise KeyboardInterrupt(f"the numbers of what was finished are in {folder}")
    return len(jobs) - len(named)


def in_turn(runs: "Sequence[Run | Exception | None]") -> bool:
    """Whether there are all runs, and one process decoded them in turn."""
    from specbench.report.files import Run

    if not all(isinstance(run, Run) for run in runs):
        return False
    return len({run.results["provenance"]["started"] for run in runs if isinstance(run, Run)}) == 1


def write_comparison(folder: Path, runs: "Sequence[Run]") -> None:
    """Prints the ranking of runs that were decoded in turn, and writes comparison.json and the page."""
    import json

    from specbench.report import files, page, tables, terminal

    rows = ranked(runs)
    content: dict[str, Any] = {"schema_version": runs[0].results["schema_version"], "kind": "comparison", "rows": rows}
    files.write_text(folder / files.COMPARISON, json.dumps(content, indent=1, allow_nan=False))
    files.write_text(folder / files.PAGE, page.comparison_page(rows, runs, folder.name))
    terminal.answer(terminal.compared_headline(rows), tables.comparison(rows), folder)


def ranked(runs: "Sequence[Run]") -> list[dict[str, Any]]:
    """The rows of a comparison. Raises ConfigError if the runs share no prompt."""
    from specbench.measure.compare import compare

    by = "tokens_per_second" if in_turn(runs) else "speedup"
    try:
        return compare({run.label: run.records for run in runs}, by)
    except ValueError as error:
        raise ConfigError(f"{error}") from error


def compare_folders(folders: Sequence[Path]) -> None:
    """Compares finished runs, in these folders or below them. Raises ConfigError."""
    from specbench.report import files, tables, terminal

    found = {run.folder: run for folder in folders for run in files.read_all(folder)}
    if len(found) < 2:
        raise ConfigError(f"{folders[0]} has one finished run: give several")
    labels = files.labels_of([run.results["details"]["overrides"] for run in found.values()])
    if len({*labels}) < len(labels):
        labels = [str(folder) for folder in found]
    runs = [files.Run(run.folder, run.results, label) for run, label in zip(found.values(), labels, strict=True)]
    if not in_turn(runs):
        print("The runs were decoded at different times: they are ranked by speedup over their own plain decoding.")
    rows = ranked(runs)
    terminal.answer(terminal.compared_headline(rows), tables.comparison(rows), folders[0])
