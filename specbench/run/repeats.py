"""repeats=R: fresh processes on the same prompts, one after the other, whose records are pooled.

How fast a process is depends on where its memory lies and on what the machine does; only several show how much. The
intervals of times are then over processes.
"""

import logging
import os
import subprocess
import sys
from pathlib import Path

from specbench.errors import CommandError, ConfigError, first_line
from specbench.executors import waiting
from specbench.report.files import Run
from specbench.report.loggers import Logger, Opening
from specbench.run.collect import write_pooled
from specbench.run.jobs import Job, finished, locked

log = logging.getLogger(__name__)


def run_repeats(job: Job) -> Run:
    """Runs the processes that are not finished, each in a folder of its own, and pools all into the job's folder.
    Raises ConfigError, CommandError if no process has results, or KeyboardInterrupt."""
    count = job.checked.root.repeats
    config = job.checked.resolved | {"repeats": 1}
    runs = []
    for number in range(count):
        folder = job.folder / f"process={number}"
        run = None if job.checked.root.force else finished(folder, config)
        if run is None:
            print(f"process {number + 1} of {count}", flush=True)
            run_process(job, folder, first=number == 0)
            run = finished(folder, config)
        if run is not None:
            runs.append(run)
    if not runs:
        raise CommandError(f"no process of {count} has results, see run.log in the folders of {job.folder}")
    changes = {"overrides": list(job.overrides), "status": "complete" if len(runs) == count else "interrupted"}
    with locked(job.folder):
        pooled = write_pooled(job.folder, runs, job.checked.resolved, **changes)
    show_logger(job, pooled)
    if len(runs) < count:
        raise CommandError(f"{len(runs)} of {count} processes are finished: the same command runs the others again")
    return pooled


def show_logger(job: Job, pooled: Run) -> None:
    """Gives the pooled run to the logger, as a run of its own. That this fails is logged: the files are there."""
    choices = job.checked.choices
    logger: Logger = choices["logger"].build()
    try:
        logger.open(Opening(pooled.results["name"], job.folder, job.checked.resolved, job.checked.names, "repeats"))
        logger.finish(pooled)
    except Exception as error:
        log.warning("logger=%s has no pooled results (%s)", choices["logger"].name, first_line(error))


def run_process(job: Job, folder: Path, first: bool) -> None:
    """Runs one process to its end. After Ctrl-C it measures what it has finished. Raises ConfigError if the first one
    refuses its configuration."""
    own = ["repeats=1", "strict=false", "hydra.mode=RUN", f"hydra.run.dir='{folder}'"]
    call = [sys.executable, "-m", "specbench", *job.overrides, *own]
    shared = os.environ.get("WANDB_RUN_ID")  # which is the pooled run's
    env = {name: value for name, value in os.environ.items() if not waiting.notes or name != "GOMP_SPINCOUNT"}
    env |= {"WANDB_RUN_ID": f"{shared}-{folder.name.replace('=', '-')}"} if shared else {}
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
