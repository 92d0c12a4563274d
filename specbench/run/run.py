"""Runs: decodes every prompt in all ways, interleaved, and measures. Does not use Hydra or W&B."""

import datetime
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from specbench.config.components import Components
from specbench.config.memory import reset_peak
from specbench.decoding import processes
from specbench.results.provenance import provenance
from specbench.results.schema import RunResult
from specbench.run.interleave import InterleavedGroup
from specbench.run.machine_watch import MachineWatch
from specbench.run.method_run import GroupHook, MethodRun
from specbench.run.phase_timer import Phases
from specbench.run.signals import defer_signals
from specbench.stats.records import RunRecord

log = logging.getLogger(__name__)
Progress = Callable[[int, int, str], None]  # requests done, all requests, what is going on
Runs = Sequence[tuple[Components, Path, GroupHook]]  # each run, its folder, and who is told of its groups
Finished = tuple[RunResult | RuntimeError, RunRecord]  # the error if every prompt failed


def run(
    parts: Components,
    out_dir: Path,
    progress: Progress = lambda done, total, what: None,
    told: GroupHook = lambda group: None,
    phases: Phases | None = None,
) -> tuple[RunResult, RunRecord]:
    """Decodes all prompts and measures. Every finished group is appended to `prompts.jsonl.part` in `out_dir`, so that
    an interrupted run keeps what it has: a signal ends the decoding, and what is finished is measured. `told` is called
    with each group when it is written, outside of all that is timed; `phases` has what came before. Raises
    KeyboardInterrupt if nothing is, ConfigError if no prompt fits the context or the folder cannot be written,
    RuntimeError if every prompt failed."""
    [(result, record)] = run_in_turn([[(parts, out_dir, told)]], progress, phases)
    if isinstance(result, RuntimeError):
        raise result
    return result, record


def run_in_turn(cohorts: Sequence[Runs], progress: Progress, phases: Phases | None = None) -> list[Finished]:
    """Several runs, each with its folder and its `told`, as `run`: each group of prompts is decoded by all of them
    before the next one begins. Those in one cohort share plain decoding. Returns what `run` does, in their order;
    nothing on ranks other than 0, whose requests are over then."""
    phases = phases or Phases()
    started, clock, status = datetime.datetime.now(datetime.UTC), time.perf_counter(), "complete"
    device = cohorts[0][0][0].target.device
    with defer_signals(), torch.inference_mode():
        members: list[MethodRun] = []
        try:
            watch = MachineWatch(device)
            reset_peak(device)
            made = []
            for runs in cohorts:
                own = [MethodRun(parts, out_dir, told, phases) for parts, out_dir, told in runs]
                members += own
                made.append(InterleavedGroup(own, watch, phases, alone=len(cohorts) == 1))
            try:
                _decode_in_turn(made, progress)
            except KeyboardInterrupt:
                if not any(member.record.groups for member in members):
                    raise
                done, total = (sum(n) for n in zip(*((c.done, c.requests.total) for c in made), strict=True))
                log.warning("interrupted after %d of %d requests: measuring what is there", done, total)
                status = "interrupted"
            if not processes.current.is_first_rank:  # rank 0 measures and writes
                return []
            watch()
            facts = provenance(device)
            facts |= {"started": started.isoformat(timespec="seconds"), "seconds": time.perf_counter() - clock}
            for cohort in made:
                for member in cohort.members:
                    member.record.too_long = len(cohort.requests.too_long)
            return [(_measured(member, status, facts, watch, phases), member.record) for member in members]
        finally:
            for member in members:
                member.saved.close()


def _decode_in_turn(cohorts: Sequence[InterleavedGroup], progress: Progress) -> None:
    """A group of each cohort, then the next one of each, until all are done."""
    total = sum(len(cohort.members) * cohort.requests.total for cohort in cohorts)

    def tell(what: str) -> None:
        done = sum(len(c.members) * (c.done + len(c.requests.too_long)) for c in cohorts)
        progress(done, total, what)

    waiting = [cohort.steps(tell) for cohort in cohorts]
    while waiting:
        waiting = [steps for steps in waiting if next(steps, None) is not None]
        tell("decoding")


def _measured(
    member: MethodRun, status: str, facts: dict[str, Any], watch: MachineWatch, phases: Phases
) -> RunResult | RuntimeError:
    try:
        with phases("statistics"):
            result = member.measure(status, facts, watch)
    except RuntimeError as error:
        return error
    result.seconds = dict(phases.seconds)
    return result
