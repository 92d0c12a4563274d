"""Executes runs: builds their parts, decodes, writes their files and gives them to their loggers."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specbench.component import from_ring
from specbench.errors import ConfigError
from specbench.results.completion import PriorRun, examine, make_room, move_aside
from specbench.results.console import ProgressFn, decoding_progress
from specbench.results.folder_lock import locked
from specbench.results.schema import Placement, RunResult
from specbench.results.writer import write_config, write_result
from specbench.run.jobs import RunJob, jobs_that_share_decoding
from specbench.run.logger_guard import logged
from specbench.run.phase_timer import Phases
from specbench.run.signals import defer_signals
from specbench.run.strict_verdict import refuse_verdict
from specbench.stats.records import Group, RunRecord

log = logging.getLogger(__name__)
Followed = tuple[Path, Callable[[Group], None]]  # the folder of a run, and what is called with each of its groups
Decoded = tuple[RunResult | RuntimeError, RunRecord, Any]  # the error if every prompt failed; the target's tokenizer
Decode = Callable[[Sequence[Followed], ProgressFn, Phases], Sequence[Decoded]]
PlacementFn = Callable[[], Placement | None]  # what the process has of its machine beside other jobs, if it is one


@dataclass
class Outcome:
    """What became of a job. `error` says why it has no result, or, if it has one, why its logger has not got it; `kept`
    is the folder into which the files of an earlier run went, if there were any."""

    job: RunJob
    result: RunResult | None = None
    kept: Path | None = None
    error: Exception | None = None


@contextmanager
def claimed(job: RunJob, wait: float = 0.0) -> Iterator[PriorRun]:
    """Inside, no other process writes into the job's folder. Yields what an earlier run has left there; what cannot be
    used is moved aside. Raises ConfigError if another process holds the folder for longer than `wait` seconds."""
    with locked(job.folder, wait):
        earlier = examine(job.folder, job.checked.identity())
        if earlier.corrupt:
            log.warning("%s is run again: %s; moved to %s", job.folder, earlier.corrupt, move_aside(job.folder))
        yield earlier


def execute_one(job: RunJob, kind: str = "run", **given: Any) -> None:
    """Executes a single run, as `execute` does. Raises ConfigError, VerdictError with strict=true, IncompleteError if
    all workers die, RuntimeError if every prompt failed, or KeyboardInterrupt after a signal."""
    [outcome] = execute([job], kind, **given)
    if outcome.error is not None:
        raise outcome.error
    assert outcome.result is not None
    if outcome.result.status == "interrupted":
        raise KeyboardInterrupt(f"what was finished is in {job.folder}")
    refuse_verdict(job.checked.root.strict, outcome.result.as_dict(), job.folder)


def execute(
    jobs: Sequence[RunJob],
    kind: str = "run",
    *,
    announce: Callable[[str], None] = lambda text: None,
    place: str = "",
    written: Callable[[dict[str, Any], Path | None], None] = lambda result, kept: None,
    begun: float | None = None,
    call: str = "",
    placement: PlacementFn = lambda: None,
) -> list[Outcome]:
    """Decodes every prompt by all jobs before the next one begins, and writes the results into their folders, which are
    locked; what stood there before stays until they are there. Those of a comparison that share plain decoding follow
    each other in what is returned.

    `kind` is what the loggers are told, `place` stands before the progress, and `written` gets what each `results.json`
    holds, and where the run went that was there before. `begun`, by `time.perf_counter`, is when the program or the job
    began; `call` is the Python expression that asked for the run, if no command did. Raises ConfigError if a job is not
    possible or its logger cannot be opened, IncompleteError if all workers die, or KeyboardInterrupt after a signal."""
    phases, folder, outcomes = Phases(begun), jobs[0].folder, list[Outcome]()
    jobs = [job for sharing in jobs_that_share_decoding(jobs) for job in sharing]
    with ExitStack() as stack:
        with phases("load"):
            decode = stack.enter_context(decoder_of(jobs, announce))
        with phases("logger"):
            loggers = [stack.enter_context(logged(job.checked, job.folder, job.overrides, kind)) for job in jobs]
        try:
            with defer_signals():  # between the end of decoding and that of writing a signal waits
                followed = [(job.folder, logger.progress) for job, logger in zip(jobs, loggers, strict=True)]
                with decoding_progress(place) as progress:
                    decoded = decode(followed, progress, phases)
                outcomes = _save_all(jobs, decoded, call, placement())
        except KeyboardInterrupt:
            if outcomes:
                raise KeyboardInterrupt(f"what was finished is in {folder}") from None
            raise
        for outcome, logger, (_, record, _) in zip(outcomes, loggers, decoded, strict=True):
            if outcome.result is None:
                continue
            written(outcome.result.as_dict(), outcome.kept)
            try:
                logger.finish(outcome.result, record)
            except ConfigError as error:
                outcome.error = error
    return outcomes


@contextmanager
def decoder_of(jobs: Sequence[RunJob], announce: Callable[[str], None]) -> Iterator[Decode]:
    """What decodes and measures the jobs, with their models loaded: this process, or the workers of a single job, which
    end with the context. Raises ConfigError, or IncompleteError if all workers die."""
    if jobs[0].checked.root.workers > 1:
        with from_ring("ray.run.on_workers")(jobs[0].checked, announce) as decode_on_workers:
            yield decode_on_workers
        return
    from specbench.config.build import Targets, build
    from specbench.run.run import run_in_turn

    targets, sharing = Targets(), jobs_that_share_decoding(jobs)
    groups = [[build(job.checked, announce, targets) for job in group] for group in sharing]
    every = [parts for group in groups for parts in group]
    if len(jobs) > 1:
        announce(f"{len(jobs)} ways of decoding in turn, {len(groups)} with plain decoding")

    def decode(followed: Sequence[Followed], progress: ProgressFn, phases: Phases) -> list[Decoded]:
        rest = iter(followed)
        runs = [[(parts, *next(rest)) for parts in group] for group in groups]
        finished = run_in_turn(runs, progress, phases)
        return [(*one, parts.target.tokenizer) for one, parts in zip(finished, every, strict=True)]

    yield decode


def _save_all(
    jobs: Sequence[RunJob], decoded: Sequence[Decoded], call: str, placement: Placement | None
) -> list[Outcome]:
    """Writes the results of each job; one that has none, or cannot be written, leaves the others as they are."""
    started = next((result.provenance["started"] for result, _, _ in decoded if isinstance(result, RunResult)), None)
    outcomes = []
    for job, (result, record, tokenizer) in zip(jobs, decoded, strict=True):
        outcomes.append(outcome := Outcome(job))
        try:
            if not isinstance(result, RunResult):
                outcome.error = result
                if len(jobs) > 1:
                    outcome.kept = make_room(job.folder)  # what stood there is of another comparison
                continue
            if len(jobs) > 1:
                result.in_turn = {"started": started, "runs": [job.checked.digest for job in jobs]}
            attach_placement(result, placement)
            if call:
                result.provenance["call"] = call
            outcome.kept = save(job, tokenizer, result, record)
            outcome.result = result
        except ConfigError as error:
            outcome.error = error
    return outcomes


def save(job: RunJob, tokenizer: Any, result: RunResult, record: RunRecord) -> Path | None:
    """Writes the files of a run into its folder, which is locked. Returns the folder into which those of an earlier run
    went, if there were any. Raises ConfigError."""
    kept = make_room(job.folder)
    write_config(job.checked.resolved, job.folder)
    identity = job.checked.identity().as_dict()  # a checkpoint of the hub has its commit now that it is there
    write_result(result, record, job.checked.digest, job.folder, tokenizer, identity, job.overrides)
    return kept


def attach_placement(result: RunResult, placement: Placement | None) -> None:
    """Puts into the results what the job had of its machine, where several jobs may run at a time."""
    result.placement = placement
    if placement is None:
        return
    result.notes += notes_on_placement(placement)
    if placement.shared and result.machine is not None:
        result.machine.steady = False
        result.machine.reasons += placement.shared


def attach_placement_of_several(result: dict[str, Any], placement: Placement | None) -> None:
    """The same for the results of several processes that one job has started, as results.json holds them."""
    if placement is None:
        return
    result |= {"placement": asdict(placement), "notes": [*result["notes"], *notes_on_placement(placement)]}
    if placement.shared and result["machine"] is not None:
        reasons = [*result["machine"]["reasons"], *placement.shared]
        result["machine"] = result["machine"] | {"steady": False, "reasons": reasons}


def notes_on_placement(placement: Placement) -> list[str]:
    """What is to be noted of a job that had cores of its own."""
    beside = f"other jobs ran on other cores of the machine ({placement.beside}): they share its memory"
    return [beside] if placement.beside else []
