"""groups.part: what a run that is not over has decoded. The same command in another process goes on from there.

A continued run has the texts, counts and verdict of one that was not ended. Its times are those of several processes,
which it says; of those before, from their beginning to the last group.
"""

import hashlib
import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from specbench.config.memory import peak_bytes
from specbench.data.prompts import Request
from specbench.decoding.executor import Executor
from specbench.results.atomic_files import GROUPS
from specbench.results.signed_file import SignedFile
from specbench.run.batching import Batch
from specbench.run.interleave import InterleavedGroup, MethodRun, Tell
from specbench.run.jobs import RunJob
from specbench.run.machine_watch import MachineWatch
from specbench.run.machines import Machines
from specbench.run.phase_timer import Phases, summed
from specbench.stats.costs import CostTable
from specbench.stats.machine_noise import Probes
from specbench.stats.records import Failure, Group

log = logging.getLogger(__name__)
OF_RECORD, OF_SESSION = ("notes", "unread", "unreadable"), ("to_read", "text_tokens")


@dataclass
class KeptGroup:
    """A group, or the failure of its requests, without the requests, and what the run was behind it."""

    requests: Sequence[str]  # an id and a hash of each
    group: Group | None
    failure: Failure | None
    costs: CostTable  # of its rounds and probes
    probes: Probes  # of the machine
    process: int  # from 1 on
    engine: frozenset[str]  # of it, as `engine_of` tells
    of_record: Mapping[str, Any]
    of_session: Mapping[str, Any]
    rows: int  # of the session
    probed: int  # probes of costs so far
    peak_bytes: int
    seconds: float  # of its process so far
    phases: Mapping[str, float]  # likewise


class KeptGroups:
    """The groups of one run that are decoded, those of earlier processes and those of this one."""

    def __init__(self, folder: Path, identity: Mapping[str, Any], afresh: bool):
        """`identity` is of the run: groups of another one are not used, and with `afresh` all are removed. Raises
        ConfigError if the file cannot be written."""
        self.begun = time.perf_counter()
        self.file = SignedFile(folder / GROUPS)
        if afresh:
            self.file.clear()
        elif self.file.found[:1] != [identity]:
            self.file.exchange(identity, "it is of a run with other settings, data, checkpoints, code or device")
        if not self.file.found:
            self.file.append(identity)
        self.waiting: list[KeptGroup] = self.file.found[1:]  # those of earlier processes that are not given back yet
        if self.waiting:
            log.info("going on after %d groups of requests that an earlier process has decoded", len(self.waiting))
        self.process = max((kept.process for kept in self.waiting), default=0) + 1
        self.probes = {kept.process: Probes() for kept in self.waiting} | {self.process: Probes()}
        self.by: list[int] = []  # the process of each group that is decoded
        self.last: dict[int, KeptGroup] = {}  # of each earlier process
        self.requests = Counter[bool]()  # by whether this process has decoded them
        self.engines: list[frozenset[str]] = []  # of each of these groups
        self.peak_bytes = 0

    def close(self) -> None:
        self.file.close()

    def give_back(self, member: MethodRun, wanted: Batch) -> KeptGroup | None:
        """What an earlier process has decoded of these requests, which the run's record has then; None if they are to
        be decoded."""
        if not self.waiting:
            return None
        kept = self.waiting.pop(0)
        if kept.requests != [known_by(request) for request in wanted.requests]:
            self.file.set_aside("the run has other prompts from there on", len(self.file.found) - len(self.waiting) - 1)
            self.waiting = []
            return None
        for result, request in zip(kept.group.results if kept.group else (), wanted.requests, strict=False):
            result.request = request
        if kept.failure is not None:
            kept.failure.requests = wanted.requests
        member.restore(kept.group, kept.failure)
        vars(member.record).update(kept.of_record)
        vars(member.session).update(kept.of_session)
        member.probed = kept.probed
        member.session.costs.join(kept.costs)
        self._count(kept)
        self.last[kept.process] = kept
        return kept

    @contextmanager
    def keeping(self, member: MethodRun, wanted: Batch, watch: MachineWatch) -> Iterator[None]:
        """Inside, this process decodes a group, which is kept unless a signal ends what follows its decoding."""
        session, record = member.session, member.record
        groups, failures = len(record.groups), len(record.failures)
        before, session.costs = session.costs, CostTable()
        whole = False
        try:
            yield
            whole = True
        finally:
            own, session.costs = session.costs, before
            before.join(own)
            found, failed = record.groups[groups:], record.failures[failures:]
            kept = KeptGroup(
                requests=[known_by(request) for request in wanted.requests],
                group=without_requests(found[0]) if found else None,
                failure=replace(failed[0], requests=()) if failed else None,
                costs=own,
                probes=watch.take(),
                process=self.process,
                engine=engine_of(member.parts.target.executor),
                of_record={name: vars(record)[name] for name in OF_RECORD},
                of_session={name: vars(session)[name] for name in OF_SESSION},
                rows=session.rows,
                probed=member.probed,
                peak_bytes=peak_bytes(member.parts.target.device),
                seconds=time.perf_counter() - self.begun,
                phases=dict(member.phases.seconds),
            )
            self._count(kept)
            if whole and (found or failed):
                self.file.append(kept)

    def _count(self, kept: KeptGroup) -> None:
        self.probes[kept.process].join(kept.probes)
        if kept.group:
            self.by.append(kept.process)
            self.engines.append(kept.engine)
        if kept.group or kept.failure:
            self.requests[kept.process == self.process] += len(kept.requests)
        self.peak_bytes = max(self.peak_bytes, kept.peak_bytes)

    def machines(self, watch: MachineWatch) -> Probes | Machines:
        """What was measured of the machine, by all processes."""
        self.probes[self.process].join(watch.take())
        if len(self.probes) == 1:
            return self.probes[self.process]
        places: dict[int, list[int]] = {}
        for place, process in enumerate(self.by):
            places.setdefault(process, []).append(place)
        reasons, counts = [], Counter(self.engines)
        if len(counts) > 1:
            ways = [(count, sorted(engine - frozenset.intersection(*counts))) for engine, count in counts.items()]
            ways.sort(key=lambda way: not way[1])  # one that has what all have comes last
            told = (f"{count} group{'s were' if count > 1 else ' was'} decoded with {', '.join(way) or 'none of these'}"
                    for count, way in ways)  # fmt: skip
            reasons = ["; ".join(told)]
        return Machines("process", self.probes, places, reasons)

    @property
    def processes(self) -> int:
        """Those that have decoded anything."""
        return len(self.last) + bool(self.requests[True])

    def facts(self, seconds: float) -> dict[str, Any]:
        """Of the run's provenance, if this process has taken so many seconds."""
        whole = {"seconds": sum(kept.seconds for kept in self.last.values()) + seconds}
        return whole | ({"processes": self.processes} if self.processes > 1 else {})

    def phases(self, own: Phases) -> dict[str, float]:
        """Seconds of all processes by phase."""
        return summed([*(kept.phases for kept in self.last.values()), own.seconds])

    def notes(self) -> list[str]:
        """What a reader of the run's times must know."""
        if not self.requests[False]:
            return []
        count, total = self.requests[False], self.requests.total()
        return [f"the run was continued in a new process: {count} of {total} requests were decoded before, and its "
                f"times are of {self.processes} process{'es' * (self.processes > 1)}"]  # fmt: skip


@contextmanager
def kept_groups(job: RunJob) -> Iterator[KeptGroups]:
    """The groups that are kept in the job's folder. Raises ConfigError."""
    with closing(KeptGroups(job.folder, job.checked.identity().as_dict(), job.checked.root.force)) as kept:
        yield kept


class ContinuedGroup(InterleavedGroup):
    """A single run, whose groups are kept."""

    def __init__(self, member: MethodRun, watch: MachineWatch, phases: Phases, kept: KeptGroups):
        super().__init__([member], watch, phases, alone=True)
        self.kept = kept

    def step(self, wanted: Batch, number: int, tell: Tell) -> None:
        """Decodes a group, unless an earlier process has done so."""
        [member] = self.members
        if (kept := self.kept.give_back(member, wanted)) is None:
            with self.kept.keeping(member, wanted, self.watch):
                super().step(wanted, number, tell)
            return
        self.done += len(kept.requests)
        while kept.rows < member.session.rows:
            member.session.halve_rows()
            self.warm = self.inputs = 0  # for so many rows it is warmed up again
        if kept.group is not None:
            for result in kept.group.results:
                self.requests.remember(result)
            kept.group.compact()


def known_by(request: Request) -> str:
    """By what a request is the same one in another process: its id, and a hash of its tokens."""
    read = request.encoder_input
    every = [*request.tokens], read and [*read]
    return f"{request.id} {hashlib.sha256(repr(every).encode()).hexdigest()}"


def engine_of(executor: Executor) -> frozenset[str]:
    """What decoded, as far as no setting says it: the number of threads, products of weights, compiled programs."""
    found = executor.facts()
    used = found.get("programs", {}).get("used")
    products = (f"{names[0]} for {shape}" for shape, names in found.get("chosen", {}).items())
    return frozenset([f"{torch.get_num_threads()} threads", f"{'' if used else 'no '}compiled programs", *products])


def without_requests(group: Group) -> Group:
    """The group as it is kept: requests are made again from the prompts."""
    missing: Any = None
    return replace(group, results=[replace(result, request=missing) for result in group.results])
