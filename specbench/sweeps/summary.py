"""The summary of a sweep, made from the folders of its jobs: table, page, and the sweep's own run of the logger."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from specbench.component import chosen_class
from specbench.interrupts import held
from specbench.report.tables import GOOD, multirun_rows, multirun_tables, show, to_csv, word
from specbench.storage.atomic import write_json, write_text, writing
from specbench.storage.lock import locked
from specbench.sweeps.job_list import MIRRORED, JobList, PlannedJob
from specbench.sweeps.launchers import SERIAL
from specbench.visible import first_line

if TYPE_CHECKING:
    from specbench.storage.finished import Earlier

log = logging.getLogger(__name__)
SUMMARIES = "summaries"  # the folder of each command's own summary.csv
WAIT = 600.0  # seconds for another process that makes the summary


def summarise(jobs: JobList, printed: bool = True, page: bool = True) -> tuple[str, int]:
    """Writes summary.csv, and the same into a file of this command's, and, unless `printed` is False, prints the table,
    from the jobs that are finished now or were before. Where results are new since the last summary, the sweep's page
    is drawn, if `page` and if runs have pages, and its logger gets the table. Returns a sentence and the exit code: 1
    if a job has no result, 3 if the verdict of one with strict=true is not good. Raises ConfigError if summary.csv
    cannot be written."""
    from specbench.storage.finished import examine

    with writing(jobs.folder):
        jobs.folder.mkdir(parents=True, exist_ok=True)
    with locked(jobs.place, WAIT), held():
        found = [(job, examine(job.folder, job.identity)) for job in jobs.jobs]
        rows = multirun_rows([(job.overrides, e.result if e.finished else None) for job, e in found])
        path, own = jobs.folder / "summary.csv", jobs.folder / SUMMARIES / f"{jobs.command}.csv"
        if printed and rows:
            show(*multirun_tables(rows, f"{len(rows)} job{'s' * (len(rows) > 1)}, written to {path}", path.name))
        with writing(path):
            own.parent.mkdir(parents=True, exist_ok=True)
        for file in (own, path):
            write_text(file, to_csv(rows))
        results = {str(job.number): e.result["provenance"]["started"] for job, e in found if e.finished and e.result}
        if results and results != _mirrored(jobs):
            if page:
                draw(jobs, [job.folder for job, e in found if e.finished])
            mirror(jobs, rows)
            write_json(jobs.place / MIRRORED, results)
    return sentence(jobs, found)


def sentence(jobs: JobList, found: Sequence[tuple[PlannedJob, "Earlier"]]) -> tuple[str, int]:
    """What is to be said of a sweep at its end, and the exit code."""
    missing = [job for job, earlier in found if not earlier.finished]
    bad = sum(job.strict and e.result is not None and word(e.result["lossless"]) not in GOOD for job, e in found)
    if bad and not missing:
        return f"strict=true: the verdict of {bad} of {len(found)} jobs is not passed", 3
    told = f"{len(missing)} of {len(found)} jobs have no result, see their run.log"
    if jobs.launcher != SERIAL and (going := {job.number for job in missing} - {*jobs.over()}):
        told += f"; {len(going)} of them have not ended"
    return told, int(bool(missing) or not found)


def mirror(jobs: JobList, rows: Sequence[dict[str, Any]]) -> None:
    """Gives the table of a sweep to the logger of its jobs. That it fails is logged: the files are there."""
    from specbench.loggers.logger import Logger

    try:
        kind, settings = chosen_class(OmegaConf.create(dict(jobs.logger)), "logger", Logger, "logger=NAME")
        kind.from_settings(settings).log_sweep(jobs.name, rows, jobs.folder)
    except Exception as error:
        log.warning("the logger has no table of the sweep (%s)", first_line(error))


def draw(jobs: JobList, folders: Sequence[Path]) -> None:
    """Writes the page of a sweep, where its jobs have pages. That it fails is logged: the files are there."""
    from specbench.report.page import write_report
    from specbench.storage.read import load_runs

    if len(folders) < 2 or not all((folder / "report.html").exists() for folder in folders):
        return
    try:
        write_report(jobs.folder, load_runs(*folders))
    except Exception as error:
        log.warning("the sweep has no page (%s)", first_line(error))


def _mirrored(jobs: JobList) -> Any:
    """When the results were measured of which the last page and table of the logger are, by job; None if there are
    none."""
    try:
        return json.loads((jobs.place / MIRRORED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
