"""Runs: decodes every prompt in all ways, interleaved, and measures. Does not use Hydra or W&B."""

import datetime
import logging
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import torch

from specbench.config.components import Components
from specbench.config.memory import reset_peak
from specbench.results.provenance import provenance
from specbench.results.schema import RunResult
from specbench.run.interleave import GroupHook, InterleavedGroup, MethodRun
from specbench.run.kept_groups import ContinuedGroup, KeptGroups
from specbench.run.machine_watch import MachineWatch
from specbench.run.phase_timer import Phases
from specbench.run.signals import allow_signals, defer_signals
from specbench.run.summary import run_result
from specbench.stats.records import RunRecord

log = logging.getLogger(__name__)
Progress = Callable[[int, int, str], None]  # requests done, all requests, what is going on
Runs = Sequence[tuple[Components, Path, GroupHook]]  # each run, its folder, and who is told of its groups
Stops = Callable[[Sequence[RunRecord]], Collection[int]]  # of all runs so far, the numbers of those that shall stop
Finished = tuple[RunResult | RuntimeError, RunRecord]  # the error if every prompt failed


def run(
    parts: Components,
    out_dir: Path,
    progress: Progress = lambda done, total, what: None,
    on_group: GroupHook = lambda group: None,
) -> tuple[RunResult, RunRecord]:
    """One run, as `run_in_turn`. Raises RuntimeError if every prompt failed."""
    [(result, record)] = run_in_turn([[(parts, out_dir, on_group)]], progress)
    if isinstance(result, RuntimeError):
        raise result
    return result, record


def run_in_turn(
    cohorts: Sequence[Runs],
    progress: Progress,
    phases: Phases | None = None,
    stops: Stops = lambda records: (),
    kept: KeptGroups | None = None,
) -> list[Finished]:
    """Several runs: each group of prompts is decoded by all of them before the next one begins. Those in one cohort
    share plain decoding. `phases` has what came before; a run that `stops` names after a group decodes no other one,
    and is interrupted. A single run goes on from the groups that are `kept`, and adds its own. Returns what was
    measured, on rank 0 alone. A signal ends the decoding, and what is finished is measured. Raises KeyboardInterrupt
    if nothing is, ConfigError if no prompt fits the context or a folder cannot be written."""
    phases = phases or Phases()
    started, clock, status = datetime.datetime.now(datetime.UTC), time.perf_counter(), "complete"
    device = cohorts[0][0][0].target.device
    with defer_signals(), torch.inference_mode():
        members: list[MethodRun] = []
        try:
            watch, groups = MachineWatch(device), []
            reset_peak(device)
            for runs in cohorts:
                own = [MethodRun(parts, out_dir, on_group, phases) for parts, out_dir, on_group in runs]
                members += own
                of_one = kept and ContinuedGroup(own[0], watch, phases, kept)
                groups.append(of_one or InterleavedGroup(own, watch, phases, len(cohorts) == 1))
                groups[-1].requests.told = groups[0].requests.told
            try:
                _decode_in_turn(groups, progress, lambda: stops([member.record for member in members]), members)
            except KeyboardInterrupt:
                if not any(member.record.groups for member in members):
                    raise
                done, total = sum(group.done for group in groups), sum(group.requests.total for group in groups)
                log.warning("interrupted after %d of %d requests: measuring what is there", done, total)
                status = "interrupted"
            watch()
            facts = provenance(device) | {"started": started.isoformat(timespec="seconds")}
            seconds = time.perf_counter() - clock
            facts |= kept.facts(seconds) if kept else {"seconds": seconds}
            probes = kept.machines(watch) if kept else watch.take()
            finished: list[Finished] = []
            for group in groups:
                for member in group.every:
                    member.record.too_long = len(group.requests.too_long)
                    member.record.notes += kept.notes() if kept else []
                    try:
                        with phases("statistics"):
                            result = run_result(
                                member.session,
                                member.record,
                                status if member in group.members else "interrupted",
                                facts,
                                probes,
                            )
                        result.seconds = kept.phases(phases) if kept else dict(phases.seconds)
                        result.memory.peak_bytes = max(result.memory.peak_bytes, kept.peak_bytes if kept else 0)
                        finished.append((result, member.record))
                    except RuntimeError as error:
                        finished.append((error, member.record))
            return finished
        finally:
            for member in members:
                if member.saved is not None:
                    member.saved.close()


def _decode_in_turn(
    groups: Sequence[InterleavedGroup],
    progress: Progress,
    stops: Callable[[], Collection[int]],
    every: Sequence[MethodRun],
) -> None:
    """A batch of each group of runs, then the next one of each, until all are done. `stops` numbers those of `every`
    run that decode no more."""
    total = sum(len(group.members) * group.requests.total for group in groups)

    def tell(what: str) -> None:
        done = sum(len(group.members) * (group.done + len(group.requests.too_long)) for group in groups)
        progress(done, total, what)

    waiting = [group.steps(tell) for group in groups]
    waiting = [steps for steps in waiting if next(steps, None) is not None]  # all are warmed up
    run_alike(groups, tell)
    while waiting:
        waiting = [steps for steps in waiting if next(steps, None) is not None]
        stopped = [every[number] for number in stops()]
        for group in groups:
            group.members = [member for member in group.members if member not in stopped]
        tell("decoding")


def run_alike(groups: Sequence[InterleavedGroup], tell: Callable[[str], None]) -> None:
    """Ways with the same settings of the executor, and plain decoding of each, run compiled programs if all of them
    have theirs. If some lack them, none of these ways uses any."""
    for setting in {repr(group.members[0].parts.config["executor"]): "" for group in groups}:
        alike = [group for group in groups if repr(group.members[0].parts.config["executor"]) == setting]
        executors = [member.parts.target.executor for group in alike for member in group.members]
        used = [bool(executor.facts().get("programs", {}).get("used")) for executor in executors]
        if any(used) and not all(used):
            why = f"compiled programs were left out, since {sum(used)} of {len(used)} ways had them"
            for group in alike:
                with allow_signals():
                    group.without_programs(f"{why}: executor=compiled, or cudagraph on CUDA, makes them for all", tell)
