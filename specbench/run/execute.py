"""Executes runs: builds their parts, decodes, writes their files and gives them to their loggers."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from specbench.errors import ConfigError, first_line
from specbench.results.completion import PriorRun, drop_groups, examine, make_room, move_aside
from specbench.results.console import ProgressFn, decoding_progress
from specbench.results.folder_lock import locked
from specbench.results.loggers.base import Logger, Opening
from specbench.results.schema import Placement, RunResult
from specbench.results.writer import write_config, write_result
from specbench.run.jobs import RunJob, jobs_that_share_decoding
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
    """What became of a job: `error` says why it has no result, or why its logger has not got it."""

    job: RunJob
    result: RunResult | None = None
    kept: Path | None = None  # the folder into which the files of an earlier run went
    error: Exception | None = None


@contextmanager
def claimed(job: RunJob, wait: float = 0.0) -> Iterator[PriorRun]:
    """Locks the job's folder, and yields what an earlier run has left there; what cannot be used is moved aside. Raises
    ConfigError if another process holds the folder for longer than `wait` seconds."""
    with locked(job.folder, wait):
        earlier = examine(job.folder, job.checked.identity())
        if earlier.corrupt:
            log.warning("%s is run again: %s; moved to %s", job.folder, earlier.corrupt, move_aside(job.folder))
        if earlier.finished:
            drop_groups(job.folder)
        yield earlier


def execute_one(job: RunJob, kind: str = "run", **given: Any) -> None:
    """A single run, as `execute`. Raises VerdictError with strict=true and RuntimeError if every prompt failed, too."""
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
    locked; what stood there before stays until they are there.

    `kind` is what the loggers are told, `place` stands before the progress, and `written` gets what each `results.json`
    holds, and where the run went that was there before. `begun`, by `time.perf_counter`, is when the program began;
    `call` is the Python expression that asked for the run. Raises ConfigError if a job is not possible or its logger
    cannot be opened, IncompleteError if all workers die, or KeyboardInterrupt after a signal."""
    phases, folder, outcomes = Phases(begun), jobs[0].folder, list[Outcome]()
    sharing = jobs_that_share_decoding(jobs)
    jobs = [job for together in sharing for job in together]
    with ExitStack() as stack:
        with phases("load"):
            decode = stack.enter_context(decoder_of(sharing, announce))
        with phases("logger"):
            loggers = [stack.enter_context(logged(job, kind)) for job in jobs]
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
def decoder_of(sharing: Sequence[Sequence[RunJob]], announce: Callable[[str], None]) -> Iterator[Decode]:
    """What decodes and measures jobs, those together that share plain decoding, with their models loaded: this process,
    or the workers of a single job. Raises ConfigError, or IncompleteError if all workers die."""
    from specbench.config.build import Targets, build
    from specbench.run.kept_groups import kept_groups
    from specbench.run.run import run_in_turn

    targets = Targets()
    tell = chain([announce], repeat(log.info))  # the memory of the first of several ways
    groups = [[build(job.checked, next(tell), targets) for job in together] for together in sharing]
    every = [parts for group in groups for parts in group]
    if len(every) > 1:
        announce(f"{len(every)} ways of decoding in turn, {len(groups)} with plain decoding")

    def decode(followed: Sequence[Followed], progress: ProgressFn, phases: Phases) -> list[Decoded]:
        rest, (job, *others) = iter(followed), [job for together in sharing for job in together]
        runs = [[(parts, *next(rest)) for parts in group] for group in groups]
        with kept_groups(job) if not others and job.checked.divisible else nullcontext() as kept:
            finished = run_in_turn(runs, progress, phases, kept=kept)
        return [(*one, parts.target.tokenizer) for one, parts in zip(finished, every, strict=True)]

    yield decode


def _save_all(
    jobs: Sequence[RunJob], decoded: Sequence[Decoded], call: str, placement: Placement | None
) -> list[Outcome]:
    """Writes the results of each job; one that has none, or cannot be written, leaves the others as they are."""
    started = next((result.provenance["started"] for result, _, _ in decoded if isinstance(result, RunResult)), None)
    outcomes = [Outcome(job) for job in jobs]
    for outcome, (result, record, tokenizer) in zip(outcomes, decoded, strict=True):
        try:
            if not isinstance(result, RunResult):
                outcome.error = result
                if len(jobs) > 1:
                    outcome.kept = make_room(outcome.job.folder)  # what stood there is of another comparison
                continue
            if len(jobs) > 1:
                result.in_turn = {"started": started, "runs": [job.checked.digest for job in jobs]}
            attach_placement(vars(result), vars(result.machine) if result.machine else None, placement)
            if call:
                result.provenance["call"] = call
            outcome.kept = save(outcome.job, tokenizer, result, record)
            outcome.result = result
        except ConfigError as error:
            outcome.error = error
    return outcomes


def save(job: RunJob, tokenizer: Any, result: RunResult, record: RunRecord) -> Path | None:
    """Writes the files of a run. Returns where those of an earlier run went, if there were any. Raises ConfigError."""
    kept = make_room(job.folder)
    write_config(job.checked.resolved, job.folder)
    identity = job.checked.identity().as_dict()  # a checkpoint of the hub has its commit now that it is there
    write_result(result, record, job.checked.digest, job.folder, tokenizer, identity, job.overrides)
    return kept


def attach_placement(result: dict[str, Any], machine: dict[str, Any] | None, placement: Placement | None) -> None:
    """Puts into the fields of results, and of their machine, what the job had of it, if others ran at the same time."""
    if placement is None:
        return
    result["placement"] = placement
    if placement.beside:
        beside = f"other jobs ran on other cores of the machine ({placement.beside}): they share its memory"
        result["notes"] = [*result["notes"], beside]
    if placement.shared and machine is not None:
        machine |= {"steady": False, "reasons": [*machine["reasons"], *placement.shared]}


class LoggerGuard:
    """The logger of a run: opened before decoding, told of each group of prompts, and given the results."""

    def __init__(self, job: RunJob, kind: str):
        """`kind` is that of `Opening`."""
        choice, groups = job.checked.choices["logger"], job.checked.choices.groups
        choices = {group: chosen.name for group, chosen in groups.items()}
        self.name, self.folder = choice.name, job.folder
        self.logger: Logger = choice.kind.from_settings(choice.settings)
        self.opening = Opening(job.checked.root.name, job.checked.resolved, choices, job.folder, kind, job.overrides)
        self.well, self.done = True, False

    def progress(self, group: Group) -> None:
        """Tells the logger of a group. An error is logged once, and the run goes on."""
        if self.well and (error := self._error_of(self.logger.progress, group)):
            self.well = False
            log.warning("logger=%s is not told of further requests (%s)", self.name, first_line(error))

    def finish(self, result: RunResult, record: RunRecord) -> None:
        """Gives the logger a run that is saved. Raises ConfigError if that fails."""
        self.done = True
        if error := self._error_of(self.logger.log, result, record, self.folder):
            failed = f"logger={self.name} failed ({first_line(error)}): the results are in {self.folder}"
            raise ConfigError(failed) from error

    def pool(self, result: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        """Gives the logger the results of several processes. That it fails is logged: the files are there."""
        if error := self._error_of(self.logger.log_repeats, self.opening, result, rows):
            log.warning("logger=%s has no pooled results (%s)", self.name, first_line(error))

    def abandon(self, status: str) -> None:
        """Tells the logger that there will be no results."""
        self._error_of(self.logger.abandon, status)

    def _error_of(self, call: Callable[..., None], *arguments: Any) -> Exception | None:
        try:
            call(*arguments)
        except Exception as error:
            log.info("the logger failed", exc_info=error)
            return error
        return None


@contextmanager
def logged(job: RunJob, kind: str = "run") -> Iterator[LoggerGuard]:
    """The logger of a run, opened; if the context is left without `finish`, it is told so. Raises ConfigError if it
    cannot be opened."""
    guard, status = LoggerGuard(job, kind), "failed"
    if error := guard._error_of(guard.logger.open, guard.opening):
        raise ConfigError(
            f"logger={guard.name} could not be opened ({first_line(error)}): nothing was decoded, use logger=none"
        ) from error
    try:
        yield guard
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    finally:
        if not guard.done:
            guard.abandon(status)
