"""repeats=R: fresh processes on the same prompts, one after the other, each a whole run, and their pooled results."""

import copy
import logging
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from specbench.config.validate import ValidatedConfig, check
from specbench.errors import ConfigError, IncompleteError
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
from specbench.run.execute import LoggerGuard, PlacementFn, attach_placement
from specbench.run.jobs import RunJob
from specbench.run.pooled import pooled, repeats_of
from specbench.run.signals import defer_signals
from specbench.run.strict_verdict import refuse_verdict
from specbench.stats.two_way_bootstrap import FEWEST_PROCESSES

log = logging.getLogger(__name__)
COPIED = ("prompts.jsonl", "rounds.parquet", "positions.parquet")  # of the first process


def run_repeats(config: DictConfig, job: RunJob, placement: PlacementFn) -> None:
    """Runs the processes that are not finished, pools all into the job's folder, which is locked, and shows the result.
    Raises ConfigError, IncompleteError, VerdictError or KeyboardInterrupt; what is finished is pooled before."""
    out_dir, count = job.folder, job.checked.root.repeats
    if count < FEWEST_PROCESSES:
        log.warning("repeats=%d gives no interval, not even of one process: it takes %d", count, FEWEST_PROCESSES)
    wanted = {out_dir / f"repeat={number}": of_process(config, job.checked, number) for number in range(count)}
    done: list[Path] = []
    interrupted, fresh, result, kept = False, False, None, None
    pace = Pace(count, "process", silent=in_sweep())
    try:
        with defer_signals():  # a signal waits while results are written
            try:
                for folder, checked in wanted.items():
                    _run_one(checked, folder, pace)
            except KeyboardInterrupt:
                interrupted = True
            done = [folder for folder, checked in wanted.items() if examine(folder, checked.identity()).finished]
            before = examine(out_dir, job.checked.identity())
            if not pace.seconds and before.finished and len(done) == count:
                result = before.result  # nothing is new
                info("All processes were finished before: these are their results (force=true measures again).")
            elif done:
                status = "interrupted" if interrupted else "incomplete" if len(done) < count else "complete"
                result, kept = write_pooled(job, done, status, placement())
                fresh = True
    except KeyboardInterrupt:
        interrupted = True
    sentence = f"{len(done)} of {count} processes are finished, in {out_dir}"
    if interrupted:
        raise KeyboardInterrupt(f"{sentence}; the same command goes on from there")
    if result is None:
        raise IncompleteError(f"{sentence}: see run.log in its folders")
    print_result(result, kept, out_dir)
    if fresh:
        LoggerGuard(job, "repeats").pool(result, rows_of(done))
    if len(done) < count:
        raise IncompleteError(f"{sentence}: the same command runs the others again")
    refuse_verdict(job.checked.root.strict, result, out_dir)


def of_process(config: DictConfig, checked: ValidatedConfig, number: int) -> ValidatedConfig:
    """The configuration of one process, counted from 0. Raises ConfigError."""
    own = copy.deepcopy(config)
    for key, value in checked.root.of_process(number).items():
        own[key] = value
    return check(own, HydraConfig.get().runtime.choices)


def _run_one(wanted: ValidatedConfig, folder: Path, pace: Pace) -> None:
    """Runs a process to its end, if its folder does not hold its results. Raises ConfigError if the first one refuses
    its configuration, or KeyboardInterrupt when the process has ended after a signal."""
    place, root = f"process {pace.over + 1} of {pace.jobs}", wanted.root
    earlier = examine(folder, wanted.identity())
    if earlier.result is not None and earlier.finished and not root.force:
        pace.end(f"finished before: {one_line(earlier.result)}", ran=False)
        return
    own = {"repeats": 1, "repeats_vary": "none", "seed": root.seed, "order": root.order}
    code = run_process([sys.executable, "-m", "specbench", *child_overrides(folder, own)])
    if code == 2 and pace.over == 0:
        raise ConfigError(f"{place} could not run: its own sentence is above, or in {folder / 'run.log'}")
    left = examine(folder, wanted.identity())
    if code not in (0, 3):  # 3: its verdict, which the pooled result shows
        log.error("%s failed (exit code %d): see %s", place, code, folder / "run.log")
    elif left.again:
        log.error("%s is not what was asked for: %s", place, left.again)
    pace.end(one_line(left.result) if left.result is not None and left.finished else "no result")


def write_pooled(
    job: RunJob, folders: Sequence[Path], status: str, placement: Placement | None
) -> tuple[dict[str, Any], Path | None]:
    """Writes the files of the processes in `folders`, pooled. Returns what results.json holds, and where those of an
    earlier run went. Raises ConfigError."""
    checked, root, out_dir, load = job.checked, job.checked.root, job.folder, partial(map, load_sums, folders)
    results = [read_result(folder) for folder in folders]
    result = pooled(results, load, checked.choices["decoding"].kind)
    result |= {
        "name": root.name,
        "config": checked.resolved,
        "status": status,
        "repeats": repeats_of(results, load, root.repeats_vary, root.repeats - len(folders)),
        "config_digest": checked.digest,
        "overrides": list(job.overrides),
    }
    result["provenance"] |= {"argv": sys.argv}
    attach_placement(result, result["machine"], placement)
    result["placement"] = placement and asdict(placement)
    kept = make_room(out_dir)
    write_config(checked.resolved, out_dir)
    for name in COPIED:
        with replacing(out_dir / name) as temporary:
            shutil.copyfile(folders[0] / name, temporary)
    numbered = (replace(sums, processes=[number] * len(sums.requests)) for number, sums in enumerate(load()))
    write_all_sums(out_dir, numbered, list(dict.fromkeys(name for sums in load() for name in sums.columns)))
    write_text(out_dir / "repeats.csv", to_csv(Table.of(rows_of(folders))))
    files = {name: contents(out_dir / name) for name in FILES}
    result["identity"] = {**checked.identity().as_dict(), "files": files}
    write_json(out_dir / RESULTS, plain(result))
    return read_result(out_dir), kept


def rows_of(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """The lines of repeats.csv."""
    results = {folder.name: read_result(folder) for folder in folders}
    return [{"process": n, **values(r, REPEATS), "lossless": word(r["lossless"])} for n, r in results.items()]
