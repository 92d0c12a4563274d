"""Records of several processes as one run: repeats=R, fresh processes on the same prompts, one after the other, and
`python -m specbench.collect FOLDER FOLDER --into D`, which joins parts of one data set that were run apart.

How fast a process is depends on where its memory lies and on what the machine does; only several show how much. The
intervals of times are then over processes.
"""

import argparse
import logging
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from specbench.errors import CommandError, ConfigError, answering, first_line, shown
from specbench.executors import waiting
from specbench.measure.results import facts_of, results
from specbench.report import files, terminal
from specbench.report.files import Logger, Opening, Run
from specbench.report.page import write_run
from specbench.run.jobs import Job, finished_job, locked, settings
from specbench.settings import Choice

log = logging.getLogger(__name__)
# Settings in which parts of one run may differ: which prompts, and how many processes there were.
OF_PARTS = ("skip", "take", "order", "repeats")


def main(words: Sequence[str] | None = None) -> None:
    """Joins parts of one data set, which were run apart, as one run."""
    parser = argparse.ArgumentParser(prog="python -m specbench.collect", description=main.__doc__)
    parser.add_argument("folders", nargs="+", type=Path, help="folders of finished runs, as with skip=0 and skip=40")
    parser.add_argument("--into", type=Path, required=True, metavar="D", help="the folder of the new run")
    args = parser.parse_args(words)
    with answering():
        terminal.summary(pool(args.folders, args.into).results, args.into)


def pool(folders: Sequence[Path], into: Path) -> Run:
    """Writes the run of several folders into one. Raises ConfigError if they are no parts of one run."""
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ConfigError(f"{' and '.join(map(str, folders))} are not all different: give each part once")
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


def refuse_different(runs: Sequence[Run]) -> None:
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


def write_pooled(folder: Path, runs: Sequence[Run], config: Mapping[str, Any], **changes: Any) -> Run:
    """Writes the files of several runs, each of which is a process, as one into a folder. Its facts are those of the
    first, with sums of seconds, the largest memory and everybody's notes, and `changes` of them."""
    records = [replace(record, process=number) for number, run in enumerate(runs) for record in run.records]
    every = [facts_of(run.results) for run in runs]
    known = [facts.provenance for facts in every]
    parts = dict.fromkeys(name for facts in every for name in facts.seconds)
    complete = all(facts.status == "complete" for facts in every)
    pooled: dict[str, Any] = {
        "provenance": known[0]
        | {"started": min(own["started"] for own in known), "seconds": sum(own["seconds"] for own in known)},
        "peak_bytes_per_second": sum(facts.peak_bytes_per_second for facts in every) / len(every),
        "memory": {name: max(facts.memory[name] for facts in every) for name in every[0].memory},
        "seconds": {name: sum(facts.seconds.get(name, 0.0) for facts in every) for name in parts},
        "status": "complete" if complete else "interrupted",
        "data": every[0].data if len({facts.data for facts in every}) == 1 else "",
        "notes": list(dict.fromkeys(note for facts in every for note in facts.notes)),
    }
    found = results(records, replace(every[0], **pooled | {"config": dict(config)} | changes))
    found["details"]["pooled"] = [str(run.folder) for run in runs]
    if "beam" in runs[0].results["details"]:  # a beam search is judged by itself, here by the worst of all processes
        found["details"]["beam"] = runs[0].results["details"]["beam"]
        found["lossless"] = min((run.results["lossless"] for run in runs), key=lambda own: own["passed"] is True)
    folder.mkdir(parents=True, exist_ok=True)
    files.write_text(folder / files.CONFIG, OmegaConf.to_yaml(OmegaConf.create(dict(config))))
    files.write_text(folder / files.RECORDS, "".join(record.line() + "\n" for record in records))
    return write_run(folder, found, records)


def run_repeats(job: Job) -> Run:
    """Runs the processes that are not finished, each in a folder of its own, and pools all into the job's folder.
    Raises ConfigError, CommandError if no process has results, or KeyboardInterrupt."""
    count = job.checked.root.repeats
    config = job.checked.resolved | {"repeats": 1}
    runs = []
    for number in range(count):
        folder = job.folder / f"process={number}"
        own = replace(job, folder=folder, checked=replace(job.checked, resolved=config))
        run = None if job.checked.root.force else finished_job(own)
        if run is None:
            print(f"process {number + 1} of {count}", flush=True)
            run_process(job, folder, first=number == 0)
            run = finished_job(own)
        if run is not None:
            runs.append(run)
    if not runs:
        raise CommandError(f"no process of {count} has results, see run.log in the folders of {job.folder}")
    changes = {"overrides": list(job.overrides), "status": "complete" if len(runs) == count else "interrupted"}
    with locked(job.folder):
        pooled = write_pooled(job.folder, runs, job.checked.resolved, **changes)
    choice: Choice = job.checked.choices["logger"]  # which is given the pooled run, as a run of its own
    try:
        logger: Logger = choice.build()
        logger.open(Opening(pooled.results["name"], job.folder, job.checked.resolved, job.checked.names, "repeats"))
        logger.finish(pooled)
    except Exception as error:  # the files are there
        log.warning("logger=%s has no pooled results (%s)", choice.name, first_line(error))
    if len(runs) < count:
        raise CommandError(f"{len(runs)} of {count} processes are finished: the same command runs the others again")
    return pooled


def run_process(job: Job, folder: Path, first: bool) -> None:
    """Runs a process, which after Ctrl-C measures what it has finished. Raises ConfigError if the first one refuses."""
    own = ["repeats=1", "strict=false", "hydra.mode=RUN", f"hydra.run.dir='{folder}'"]
    call = [sys.executable, "-m", "specbench", *job.overrides, *own]
    not_its = ("WANDB_RUN_ID", *(["GOMP_SPINCOUNT"] if waiting.notes else []))  # the pooled run's, and chosen anew
    env = {name: value for name, value in os.environ.items() if name not in not_its}
    # In a session of its own a terminal's Ctrl-C does not reach it: it gets exactly one signal, from here.
    with subprocess.Popen(call, start_new_session=True, env=env) as process:
        try:
            code = process.wait()
        except KeyboardInterrupt:
            process.terminate()
            process.wait()
            raise
    if code == 2 and first:
        raise ConfigError(f"the first process could not run: its sentence is above, or in {folder / 'run.log'}")
    if code:
        log.error("a process failed with exit code %d, see %s", code, folder / "run.log")
