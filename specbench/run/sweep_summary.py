"""The summary of a sweep, made from the folders of its jobs: table, page, and the sweep's own run of the logger."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from specbench.component import chosen_class
from specbench.errors import first_line
from specbench.results.atomic_files import remove_half_written, write_json, write_text, writing
from specbench.results.fingerprint import Identity
from specbench.results.folder_lock import locked
from specbench.results.loggers.base import Logger
from specbench.results.sweep_table import multirun_rows, multirun_tables
from specbench.results.table import Table, to_csv
from specbench.results.terminal import show
from specbench.run.signals import defer_signals
from specbench.run.strict_verdict import is_good, of_several

log = logging.getLogger(__name__)
PLACE, MIRRORED = ".sweep", "mirrored.json"  # in the sweep's folder: a folder for each command, with this file
SUMMARIES = "summaries"  # the folder of each command's own summary.csv
WAIT = 600.0  # seconds for another process that makes the summary


@dataclass(frozen=True)
class PlannedJob:
    """One job: its overrides, its folder, what it is made of, and whether its verdict must be good."""

    number: int
    overrides: list[str]
    folder: Path
    identity: Identity
    strict: bool


@dataclass(frozen=True)
class SweepJobs:
    """The jobs of one command, whose folder is `folder`. `logger` is the configuration of their logger."""

    folder: Path
    command: str  # its overrides, as the name of a file
    name: str
    logger: Mapping[str, Any]
    jobs: Sequence[PlannedJob]

    @property
    def place(self) -> Path:
        """The folder of what is noted of this command."""
        return self.folder / PLACE / self.command

    def not_ended(self) -> Set[int]:
        """The jobs that may still run in other processes."""
        return frozenset()


def summarise(jobs: SweepJobs, printed: bool = True, page: bool = True, redraw: bool = False) -> tuple[str, int]:
    """Writes summary.csv, and the same into a file of this command's, from the jobs that are finished, and prints the
    table if it shall be `printed`. Where results are new, or with `redraw`, the sweep's page is drawn, if `page` and if
    runs have pages, and its logger gets the table. Returns a sentence and the exit code: 1 if a job has no result, 3 if
    the verdict of one with strict=true is not good. Raises ConfigError if summary.csv cannot be written."""
    from specbench.results.completion import examine  # loads pyarrow

    with writing(jobs.folder):
        jobs.folder.mkdir(parents=True, exist_ok=True)
    with locked(jobs.folder / PLACE, WAIT), defer_signals():  # all commands of the folder write the same files
        examined = [(job, examine(job.folder, job.identity)) for job in jobs.jobs]
        rows = multirun_rows([(job.overrides, e.result if e.finished else None) for job, e in examined])
        path, own = jobs.folder / "summary.csv", jobs.folder / SUMMARIES / f"{jobs.command}.csv"
        if printed and rows:
            show(*multirun_tables(rows, f"{len(rows)} job{'s' * (len(rows) > 1)}, written to {path}", path.name))
        with writing(path):
            own.parent.mkdir(parents=True, exist_ok=True)
        for file in (own, path):
            write_text(file, to_csv(Table.of(rows)))
        results = {str(job.number): e.result["provenance"]["started"] for job, e in examined if e.finished and e.result}
        if results and page:
            folders = [job.folder for job, e in examined if e.finished]
            _once(jobs, "page", results, lambda: draw_page(jobs, folders), redraw)
        if results:
            _once(jobs, "logger", results, lambda: log_table(jobs, rows))
        if not jobs.not_ended():
            remove_half_written(jobs.place, below=True)
    return closing_sentence(jobs, examined)


def _once(jobs: SweepJobs, what: str, results: dict[str, str], make: Callable[[], bool], again: bool = False) -> None:
    """Makes what shows the results, unless that was made of these before, or `again`. If it succeeds, it is noted when
    the results were measured, by job, of which the last page is ("page"), or the last table of the logger."""
    noted: Any = None
    with suppress(OSError, ValueError):
        noted = json.loads((jobs.place / MIRRORED).read_text(encoding="utf-8"))
    noted = noted if isinstance(noted, dict) else {}
    if (again or noted.get(what) != results) and make():
        jobs.place.mkdir(parents=True, exist_ok=True)  # a comparison has no list of jobs there
        write_json(jobs.place / MIRRORED, noted | {what: results})


def closing_sentence(jobs: SweepJobs, examined: Sequence[tuple[PlannedJob, Any]]) -> tuple[str, int]:
    """What is to be said of a sweep at its end, and the exit code."""
    missing = [job for job, earlier in examined if not earlier.finished]
    strict = [e.result["lossless"] for job, e in examined if job.strict and e.result is not None]
    alone = sum(not is_good(lossless) for lossless in strict)
    bad = sum(not is_good(of_several(lossless, len(strict))) for lossless in strict)
    if alone > bad:
        log.warning("strict=true: %d failed by p-values that one of %d tests may have", alone - bad, len(strict))
    if bad and not missing:
        return f"strict=true: the verdict of {bad} of {len(examined)} jobs is not passed", 3
    text = f"{len(missing)} of {len(examined)} jobs have no result, see their run.log"
    if going := {job.number for job in missing} & jobs.not_ended():
        text += f"; {len(going)} of them have not ended"
    return text, int(bool(missing) or not examined)


def log_table(jobs: SweepJobs, rows: Sequence[dict[str, Any]]) -> bool:
    """Gives the table of a sweep to the logger of its jobs. Returns whether it did: the files are there in any case."""
    try:
        kind, settings = chosen_class(OmegaConf.create(dict(jobs.logger)), "logger", Logger, "logger=NAME")
        kind.from_settings(settings).log_sweep(jobs.name, rows, jobs.folder)
    except Exception as error:
        log.warning("the logger has no table of the sweep (%s)", first_line(error))
        return False
    return True


def draw_page(jobs: SweepJobs, folders: Sequence[Path]) -> bool:
    """Writes the page of a sweep, where its jobs have pages. Returns False if that fails, which is logged."""
    from specbench.results.reader import load_runs
    from specbench.results.report.page import write_report

    if len(folders) < 2 or not all((folder / "report.html").exists() for folder in folders):
        return True
    try:
        write_report(jobs.folder, load_runs(*folders))
    except Exception as error:
        log.warning("the sweep has no page (%s)", first_line(error))
        return False
    return True
