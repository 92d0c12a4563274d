"""One worker of a run, in a process of its own. A group has the cache columns and the requests that it has in a single
process."""

import logging
import os
import socket
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from specbench.config.memory import peak_bytes, reset_peak
from specbench.config.validate import ValidatedConfig
from specbench.contrib.cluster.cpu_affinity import pin_cores, placement
from specbench.contrib.ray.merge import Limits, Piece
from specbench.errors import ConfigError
from specbench.executors.machine import device_name
from specbench.results.provenance import provenance
from specbench.results.schema import RunResult
from specbench.run.batching import TurnPlan
from specbench.run.components import Components
from specbench.run.interleave import InterleavedGroup
from specbench.run.machine_watch import MachineWatch
from specbench.run.method_run import MethodRun
from specbench.run.phase_timer import Phases
from specbench.run.pooled import worst_machine
from specbench.stats.costs import CostTable
from specbench.stats.estimates import Machine
from specbench.stats.machine_noise import Probes, Roofs
from specbench.stats.records import Failure, Group, PerRequestSums, RunRecord


@dataclass(frozen=True)
class Place:
    """Where a worker runs."""

    host: str
    device: str
    cores: Sequence[int]
    threads: int
    seconds: float  # from its first call until its models were loaded
    memory: str = ""  # what it needs, in words
    code: Mapping[str, str] = field(default_factory=dict)  # versions, as in `Identity`
    sources: Mapping[str, str] = field(default_factory=dict)  # likewise
    shared: Sequence[str] = ()  # as in `Placement`


@dataclass(frozen=True)
class Opened:
    """What the process that gives out the groups has to know of a run before any of them is decoded."""

    requests: int  # turns of all prompts
    turns: int  # of the prompt that has the most
    columns: Mapping[str, tuple[str, ...]]  # as those of `Record`
    reads_different: bool  # as in `Merger`


@dataclass(frozen=True)
class Groups:
    """The groups of one turn, by number, and the requests so far that do not fit the context."""

    numbers: range
    too_long: int
    digest: int  # of the prompts


class Worker:
    """Builds the parts of a run, decodes the groups that it is given, and measures what all workers have decoded."""

    parts: Components
    member: MethodRun
    cohort: InterleavedGroup

    def __init__(self, number: int):
        self.number, self.decoded = number, 0
        self.own = ExitStack()  # its cores, until its process ends
        self.turns: list[TurnPlan] = []

    def host(self) -> str:
        """The name of its machine."""
        return socket.gethostname()

    @torch.inference_mode()
    def load(
        self, checked: ValidatedConfig, device: str, cores: int, folder: str, beside: int = 1, waits: bool = False
    ) -> tuple[Place, Opened, Any]:
        """Takes so many cores for itself, and builds the parts as a process with this device would, in this folder if
        it is there. `beside` workers, itself among them, need as much memory of the machine; with `waits` it waits for
        cores that others have. Returns the target's tokenizer too. Raises ConfigError."""
        begun = time.perf_counter()
        if os.path.isdir(folder):
            os.chdir(folder)
        if cores:
            self.own.enter_context(pin_cores("workers", cores, told=(lambda text: None) if waits else refuse_waiting))
            torch.set_num_threads(cores)
        from specbench.config.build import build

        checked = replace(checked, root=replace(checked.root, device=device, workers=1))
        told: list[str] = []
        opened = self.take(build(checked, told.append, beside=beside))
        seconds, found, had = time.perf_counter() - begun, checked.identity(), placement()
        place = Place(
            host=self.host(),
            device=device_name(self.parts.target.device),
            cores=had.cores if had else [],
            threads=torch.get_num_threads(),
            seconds=seconds,
            memory="; ".join(told),
            code=found.code,
            sources=found.sources,
            shared=had.shared if had else [],
        )
        return place, opened, self.parts.target.tokenizer

    def take(self, parts: Components) -> Opened:
        """Begins a run of these parts."""
        self.parts, device = parts, parts.target.device
        reset_peak(device)
        self.watch = MachineWatch(device)
        self.member = MethodRun(parts, None, lambda group: None, Phases())
        self.cohort = InterleavedGroup([self.member], self.watch, Phases())
        requests, different = self.cohort.requests, parts.target.sampling.greedy and parts.decoding.samples
        return Opened(requests.total, requests.turns_in_all, self.member.record.columns, different)

    @torch.inference_mode()
    def open(self, number: int, answers: Mapping[str, Sequence[str]]) -> Groups:
        """Opens the turns up to this one, and warms up for each. `answers` are those of plain decoding, by prompt; they
        are all known for the turns before. Raises ConfigError."""
        requests = self.cohort.requests
        while len(self.turns) <= number:
            turn = len(self.turns)
            requests.answers = {prompt: [*answers.get(prompt, ())][:turn] for prompt in requests.answers}
            self.turns.append(requests.open(turn, self.turns[-1].groups.stop if self.turns else 0))
            if self.turns[-1].groups:
                self.cohort.prepare(requests.wanted(self.turns[-1], self.turns[-1].first), lambda what: None)
        turn_of_all = self.turns[number]
        digest = zlib.crc32(repr([(prompt.id, prompt.turns) for prompt in turn_of_all.waiting]).encode())
        return Groups(turn_of_all.groups, len(requests.too_long), digest)

    @torch.inference_mode()
    def decode(self, number: int, limits: Limits) -> Piece:
        """Decodes a group of the last turn that was opened, in all ways, and reads its texts. `limits` are those of a
        single process at the group's begin, or above."""
        begun, session, member, requests = time.perf_counter(), self.member.session, self.member, self.cohort.requests
        member.record = record = RunRecord(columns=member.record.columns)
        session.costs, session.to_read, session.text_tokens = CostTable(), limits.to_read, limits.text_tokens
        with said() as warnings:
            self.cohort.step(requests.wanted(self.turns[-1], number), self.decoded, lambda what: None)
        self.decoded += 1
        prompts = [result.request.prompt_id for group in record.groups for result in group.results]
        return Piece(
            number=number,
            worker=self.number,
            group=next(iter(record.groups), None),
            failure=next(iter(record.failures), None),
            answers={prompt: requests.answers[prompt][-1] for prompt in prompts},
            costs=session.costs,
            probes=self.watch.take(),
            unread=record.unread,
            unreadable=record.unreadable,
            peak_bytes=peak_bytes(self.parts.target.device),
            seconds=time.perf_counter() - begun,
            warnings=warnings,
        )

    def fail(self, number: int, error: str) -> Piece:
        """A group of the last turn that nobody could decode."""
        requests = self.cohort.requests.wanted(self.turns[-1], number).requests
        return Piece(number, self.number, None, Failure(requests, error), {}, CostTable(), Probes())

    @torch.inference_mode()
    def measure(
        self, record: RunRecord, pieces: Sequence[Piece], status: str, facts: Mapping[str, Any]
    ) -> tuple[RunResult, PerRequestSums]:
        """Everything that is measured of a run, from its merged record and all pieces in the order of their groups,
        without their groups. `facts` are added to its provenance. Raises RuntimeError if every prompt failed."""
        self.member.record, self.member.session.costs = record, CostTable()
        for piece in pieces:
            self.member.session.costs.join(piece.costs)
        found = {**provenance(self.parts.target.device), **facts}
        result = self.member.measure(status, found, Machines(pieces))
        result.memory.peak_bytes = max(piece.peak_bytes for piece in pieces)
        return result, record.sums


class Machines:
    """The machines of all workers, each judged by the groups that it has decoded, in its own order."""

    def __init__(self, pieces: Sequence[Piece]):
        self.order = sorted((piece for piece in pieces if piece.failure is None), key=lambda piece: piece.ended)
        self.places = {number: place for place, number in enumerate(sorted(piece.number for piece in self.order))}
        self.probes: dict[int, Probes] = {}  # by worker
        for piece in self.order:
            self.probes.setdefault(piece.worker, Probes()).join(piece.probes)

    @property
    def roofs(self) -> Roofs:
        """The bandwidth of all machines together: the median of their reads."""
        every = Probes()
        for probes in self.probes.values():
            every.join(probes)
        return every.roofs

    def judge(self, groups: Sequence[Group]) -> Machine:
        """`groups` are those of the run, in their order."""
        own: dict[int, list[Group]] = {worker: [] for worker in self.probes}
        for piece in self.order:
            own[piece.worker].append(groups[self.places[piece.number]])
        found = {f"worker {n}": asdict(probes.judge(own[n])) for n, probes in sorted(self.probes.items())}
        return Machine(**worst_machine(found))


@contextmanager
def said() -> Iterator[list[str]]:
    """The warnings that specbench logs inside this context, for the process that has the run's log."""
    texts: list[str] = []
    handler, logger = logging.Handler(logging.WARNING), logging.getLogger("specbench")
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)


def refuse_waiting(why: str) -> None:
    """Raises ConfigError, for a worker that would wait for cores when the run begins."""
    raise ConfigError(f"a worker {why}: use a lower workers, or wait for their end")
