"""repeats=R: fresh processes on the same prompts, one after the other, each a whole run, and their pooled results."""

import copy
import logging
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from specbench.config.validate import ValidatedConfig, check
from specbench.errors import ConfigError, IncompleteError, first_line
from specbench.results.atomic_files import replacing, write_json, write_text
from specbench.results.completion import FILES, RESULTS, contents, examine, make_room
from specbench.results.console import Pace, in_sweep, info, one_line, print_result
from specbench.results.fields import REPEATS, values
from specbench.results.parquet import load_sums, write_all_sums
from specbench.results.reader import read_result
from specbench.results.schema import Placement, plain
from specbench.results.table import Table, to_csv
from specbench.results.wording import word
from specbench.results.writer import write_config
from specbench.run.child_command import child_overrides, run_process
from specbench.run.execute import PlacementFn, attach_placement_of_several
from specbench.run.jobs import RunJob
from specbench.run.logger_guard import logger_of
from specbench.run.pooled import pooled, repeats_of
from specbench.run.signals import defer_signals
from specbench.run.strict_verdict import refuse_verdict
from specbench.stats.records import PerRequestSums

log = logging.getLogger(__name__)
COPIED = ("prompts.jsonl", "rounds.parquet", "positions.parquet")  # of the first process


def run_repeats(config: DictConfig, job: RunJob, placement: PlacementFn = lambda: None) -> None:
    """Runs the processes that are not finished, pools all into the job's folder, which is locked, and shows the result.
    Raises ConfigError, IncompleteError if a process has no result, VerdictError with strict=true, or KeyboardInterrupt;
    what is finished is pooled before."""
    checked, out_dir = job.checked, job.folder
    wanted = [of_process(config, checked, number) for number in range(checked.root.repeats)]
    folders = [out_dir / f"repeat={number}" for number in range(len(wanted))]
    done, interrupted, fresh, result, kept = [], False, False, None, None
    try:
        with defer_signals():  # a signal waits while results are written
            try:
                pace = Pace(len(folders), "process", silent=in_sweep())
                for number, (one, folder) in enumerate(zip(wanted, folders, strict=True)):
                    _run_one(one, folder, number, pace)
            except KeyboardInterrupt:
                interrupted = True
            done = [f for f, one in zip(folders, wanted, strict=True) if examine(f, one.identity()).finished]
            before = examine(out_dir, checked.identity())
            if not pace.seconds and before.finished and len(done) == len(folders):
                result = before.result  # nothing is new
                info("All processes were finished before: these are their results (force=true measures again).")
            elif done:
                result, kept = write_pooled(job, done, len(folders) - len(done), interrupted, placement())
                fresh = True
    except KeyboardInterrupt:
        interrupted = True
    sentence = f"{len(done)} of {len(folders)} processes are finished, in {out_dir}"
    if interrupted:
        raise KeyboardInterrupt(f"{sentence}; the same command goes on from there")
    if result is None:
        raise IncompleteError(f"{sentence}: see run.log in its folders")
    print_result(result, kept, out_dir)
    if fresh:
        log_pooled(job, result, done)
    if len(done) < len(folders):
        raise IncompleteError(f"{sentence}: the same command runs the others again")
    refuse_verdict(checked.root.strict, result, out_dir)


def of_process(config: DictConfig, checked: ValidatedConfig, number: int) -> ValidatedConfig:
    """The configuration of one process, counted from 0. Raises ConfigError."""
    own = copy.deepcopy(config)
    for key, value in checked.root.of_process(number).items():
        own[key] = value
    return check(own, HydraConfig.get().runtime.choices)


def _run_one(wanted: ValidatedConfig, folder: Path, number: int, pace: Pace) -> None:
    """Runs a process to its end, if its folder does not hold its results. Raises ConfigError if the first one says that
    the configuration is not possible, or KeyboardInterrupt when the process has ended after a signal."""
    place = f"process {number + 1} of {pace.jobs}"
    earlier = examine(folder, wanted.identity())
    if earlier.result is not None and earlier.finished and not wanted.root.force:
        pace.end(f"finished before: {one_line(earlier.result)}", ran=False)
        return
    code = run_process(command(wanted, folder))
    if code == 2 and number == 0:
        raise ConfigError(f"{place} could not run: its own sentence is above, or in {folder / 'run.log'}")
    left = examine(folder, wanted.identity())
    if code not in (0, 3):  # 3: its verdict, which the pooled result shows
        log.error("%s failed (exit code %d): see %s", place, code, folder / "run.log")
    elif left.again:
        log.error("%s is not what was asked for: %s", place, left.again)
    pace.end(one_line(left.result) if left.result is not None and left.finished else "no result")


def command(wanted: ValidatedConfig, folder: Path) -> list[str]:
    """The command of one process: the overrides of this one, without those that several processes change."""
    root = wanted.root
    own = {"repeats": 1, "repeats_vary": "none", "seed": root.seed, "order": root.order}
    return [sys.executable, "-m", "specbench", *child_overrides(folder, own)]


def write_pooled(
    job: RunJob, folders: Sequence[Path], missing: int, interrupted: bool, placement: Placement | None
) -> tuple[dict[str, Any], Path | None]:
    """Writes the files of the pooled results of the processes in `folders`, and returns what results.json holds, and
    where the files of an earlier run went. Raises ConfigError."""
    checked, out_dir = job.checked, job.folder
    results = [read_result(folder) for folder in folders]
    kinds = (checked.choices[group].kind for group in ("baseline", "decoding"))
    result = pooled(results, partial(map, load_sums, folders), *kinds)
    result |= {
        "name": checked.root.name,
        "config": checked.resolved,
        "status": "interrupted" if interrupted else "incomplete" if missing else "complete",
        "repeats": repeats_of(results, partial(map, load_sums, folders), checked.root.repeats_vary, missing),
        "config_digest": checked.digest,
        "overrides": list(job.overrides),
    }
    result["provenance"] |= {"argv": sys.argv}
    attach_placement_of_several(result, placement)
    kept = make_room(out_dir)
    write_config(checked.resolved, out_dir)
    for name in COPIED:
        with replacing(out_dir / name) as temporary:
            shutil.copyfile(folders[0] / name, temporary)
    names = list(dict.fromkeys(name for sums in map(load_sums, folders) for name in sums.columns))
    write_all_sums(out_dir, _numbered(folders), names)
    write_text(out_dir / "repeats.csv", to_csv(Table.of([_row(f, r) for f, r in zip(folders, results, strict=True)])))
    files = {name: contents(out_dir / name) for name in FILES}
    result["identity"] = {**checked.identity().as_dict(), "files": files}
    write_json(out_dir / RESULTS, plain(result))
    return read_result(out_dir), kept


def log_pooled(job: RunJob, result: dict[str, Any], folders: Sequence[Path]) -> None:
    """Gives the pooled results to the logger. That it fails is logged: the files are there."""
    logger, opening = logger_of(job.checked, job.folder, job.overrides, "repeats")
    rows = [_row(folder, read_result(folder)) for folder in folders]
    try:
        logger.log_repeats(opening, result, rows)
    except Exception as error:
        log.warning("logger=%s has no pooled results (%s)", job.checked.choices["logger"].name, first_line(error))
        log.info("the logger failed", exc_info=error)


def _numbered(folders: Sequence[Path]) -> Iterator[PerRequestSums]:
    """The sums of every process, with its number."""
    for number, sums in enumerate(map(load_sums, folders)):
        yield replace(sums, processes=[number] * len(sums.requests))


def _row(folder: Path, result: dict[str, Any]) -> dict[str, Any]:
    """A line of repeats.csv."""
    numbers = values(result, REPEATS)
    return {"process": folder.name, **numbers, "lossless": word(result["lossless"])}
