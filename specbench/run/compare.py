"""Runs the jobs of a sweep in one process: every prompt is decoded by all of them before the next one begins."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbench.config.build import build
from specbench.config.loaded_targets import Targets
from specbench.config.schema import NOT_HASHED
from specbench.config.validate import ValidatedConfig
from specbench.errors import ConfigError, first_line
from specbench.results.comparability import TASK
from specbench.results.completion import examine, make_room
from specbench.results.folder_lock import locked
from specbench.results.progress import decoding_progress
from specbench.results.schema import RunResult
from specbench.run.components import Components
from specbench.run.execute import LoggerGuard, logged, save
from specbench.run.run import run_in_turn
from specbench.run.signals import allow_signals

log = logging.getLogger(__name__)
# Settings that plain decoding does not depend on: jobs that differ in no other share it.
NOT_PLAIN = (*NOT_HASHED, "drafter", "gamma", "gamma_policy", "verifier", "lenience", "lenience_policy", "metrics",
             "baseline", "verdict_tokens")  # fmt: skip


@dataclass(frozen=True)
class Job:
    """A job of the sweep."""

    overrides: Sequence[str]
    folder: Path
    checked: ValidatedConfig


def groups_of(jobs: Sequence[Job], key: Callable[[Job], Any]) -> list[list[Job]]:
    """Jobs with the same key, in order."""
    found: dict[str, list[Job]] = {}
    for job in jobs:
        found.setdefault(repr(key(job)), []).append(job)
    return list(found.values())


def cohorts_of(jobs: Sequence[Job]) -> list[list[Job]]:
    """Jobs that share plain decoding."""
    return groups_of(jobs, lambda job: [(k, v) for k, v in job.checked.resolved.items() if k not in NOT_PLAIN])


def tasks_of(jobs: Sequence[Job]) -> list[list[Job]]:
    """Jobs that decode the same prompts in the same way, whichever engine does it."""
    return groups_of(jobs, lambda job: [job.checked.resolved.get(key) for key in TASK])


def labels_of(words: Sequence[Mapping[str, str]]) -> list[str]:
    """A short name for each job: the values of its own overrides, with their keys where values alone would not do."""
    found = [" ".join(own.values()) for own in words]
    if len({*found}) == len(found) and "" not in found:
        return found
    return [" ".join(f"{key}={value}" for key, value in own.items()) or "without overrides" for own in words]


def is_finished(jobs: Sequence[Job]) -> bool:
    """Whether every job's folder holds its finished run, all of them of one comparison."""
    found = [examine(job.folder, job.checked.identity()) for job in jobs]
    if any(earlier.result is None or not earlier.finished for earlier in found):
        return False
    ways = [(earlier.result or {}).get("in_turn") for earlier in found]
    return ways[0] is not None and all(way == ways[0] for way in ways) and len(ways[0]["runs"]) == len(jobs)


def run_jobs(jobs: Sequence[Job], announce: Callable[[str], None]) -> str:
    """Builds all jobs, decodes in turn and writes each one's folder. Returns the status: "complete", "interrupted" or,
    if a way has no results, "incomplete". Raises ConfigError."""
    cohorts = cohorts_of(jobs)
    with ExitStack() as locks:
        for job in jobs:
            locks.enter_context(locked(job.folder))
        with allow_signals():
            targets = Targets()
            built = [[(job, build(job.checked, announce, targets)) for job in cohort] for cohort in cohorts]
            logs = {job.folder: locks.enter_context(logged(job.checked, job.folder, job.overrides, "way"))
                    for job in jobs}  # fmt: skip
        made = [[(parts, job.folder, logs[job.folder].progress) for job, parts in runs] for runs in built]
        announce(f"{len(jobs)} ways of decoding in turn, {len(cohorts)} with plain decoding")
        with decoding_progress() as progress:
            found = run_in_turn(made, progress)
        return _save_all([one for runs in built for one in runs], found, logs, announce)


def _save_all(
    jobs: Sequence[tuple[Job, Components]],
    found: Sequence[Any],
    logs: Mapping[Path, LoggerGuard],
    announce: Callable[[str], None],
) -> str:
    """Writes the results of each way, and announces where those of an earlier run went; one that has none, or cannot be
    written, leaves the others as they are."""
    statuses, shared = {"complete"}, _in_turn(found, [job for job, _ in jobs])
    moved: list[Path | None] = []
    for (job, parts), (result, record) in zip(jobs, found, strict=True):
        try:
            if not isinstance(result, RunResult):
                moved.append(make_room(job.folder))  # what stood there is of another comparison
                raise ConfigError(f"{' '.join(job.overrides)}: {first_line(result)}")
            result.in_turn = shared
            moved.append(save(job.checked, parts.target.tokenizer, result, record, job.folder, job.overrides))
            statuses.add(result.status)
        except ConfigError as error:
            log.error("%s", error)
            statuses.add("incomplete")
            continue
        try:
            logs[job.folder].finish(result, record)
        except ConfigError as error:
            log.error("%s", error)
    if kept := [path for path in moved if path is not None]:
        announce(
            f"earlier runs of {len(kept)} of {len(jobs)} ways are now in {kept[0]}" + " and the like" * (len(kept) > 1)
        )
    return "interrupted" if "interrupted" in statuses else "incomplete" if "incomplete" in statuses else "complete"


def _in_turn(found: Sequence[Any], jobs: Sequence[Job]) -> dict[str, Any]:
    """What results.json says of runs that were decoded in turn."""
    started = next((r.provenance["started"] for r, _ in found if isinstance(r, RunResult)), None)
    return {"started": started, "runs": [job.checked.digest for job in jobs]}
