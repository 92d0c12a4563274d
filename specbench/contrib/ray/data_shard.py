"""A worker's part of a run: it decodes the groups that it is given, and one worker measures what all have decoded."""

import logging
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from specbench.config.components import Components
from specbench.config.memory import peak_bytes, reset_peak
from specbench.contrib.ray.merge import GroupLimits, Piece, joined_costs
from specbench.results.provenance import provenance
from specbench.results.schema import RunResult
from specbench.run.batching import Batch
from specbench.run.interleave import InterleavedGroup, MethodRun
from specbench.run.machine_watch import MachineWatch
from specbench.run.machines import Machines
from specbench.run.phase_timer import Phases
from specbench.run.summary import run_result
from specbench.stats.costs import CostTable
from specbench.stats.machine_noise import Probes
from specbench.stats.records import Failure, Group, PerRequestSums, RunRecord

log = logging.getLogger(__name__)


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


class Shard:
    """The state of one worker. It decodes any group of the run, with the cache columns and the other requests in the
    group that the group has in a single process."""

    def __init__(self, parts: Components, number: int):
        """`number` is the worker's."""
        self.parts, self.number, self.decoded = parts, number, 0
        device = parts.target.device
        reset_peak(device)
        self.watch = MachineWatch(device)
        self.member = MethodRun(parts, None, lambda group: None, Phases())
        self.cohort = InterleavedGroup([self.member], self.watch, Phases())
        self.turns: list[list[Batch]] = []  # their groups

    def opened(self) -> Opened:
        parts, requests = self.parts, self.cohort.requests
        different = parts.target.sampling.greedy and parts.decoding.samples
        return Opened(requests.total, requests.turns, self.member.record.columns, different)

    def open(self, number: int, answers: Mapping[str, Sequence[str]]) -> Groups:
        """Opens the turns up to this one, and warms up for each. `answers` are those of plain decoding, by prompt; they
        are all known for the turns before. Raises ConfigError."""
        requests = self.cohort.requests
        while len(self.turns) <= number:
            turn = len(self.turns)
            requests.answers = {prompt: [*answers.get(prompt, ())][:turn] for prompt in requests.answers}
            self.turns.append(requests.open(turn, sum(map(len, self.turns))))
            if self.turns[-1]:
                self.cohort.prepare(self.turns[-1][0], lambda what: None)
        batches, first = self.turns[number], sum(map(len, self.turns[:number]))
        texts = [(request.id, request.text) for batch in batches for request in batch.requests]
        return Groups(range(first, first + len(batches)), len(requests.too_long), zlib.crc32(repr(texts).encode()))

    def decode(self, number: int, limits: GroupLimits) -> Piece:
        """Decodes a group of the last turn that was opened, in all ways, and reads its texts. `limits` are those of a
        single process at the group's begin, or above."""
        begun, session, member = time.perf_counter(), self.member.session, self.member
        member.record = record = RunRecord(columns=member.record.columns)
        session.costs, session.to_read, session.text_tokens = CostTable(), limits.to_read, limits.text_tokens
        with said() as warnings:
            self.cohort.step(self._batch(number), self.decoded, lambda what: None)
        self.decoded += 1
        return Piece(
            number=number,
            worker=self.number,
            group=next(iter(record.groups), None),
            failure=next(iter(record.failures), None),
            answers=self._answers(record.groups),
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
        failure = Failure(self._batch(number).requests, error)
        return Piece(number, self.number, None, failure, {}, CostTable(), Probes())

    def _batch(self, number: int) -> Batch:
        """The group of this number, of the last turn that was opened."""
        return next(batch for batch in self.turns[-1] if batch.number == number)

    def measure(
        self, record: RunRecord, pieces: Sequence[Piece], status: str, facts: Mapping[str, Any]
    ) -> tuple[RunResult, PerRequestSums]:
        """Everything that is measured of a run, from its merged record and all pieces in the order of their groups,
        without their groups. `facts` are added to its provenance. Raises RuntimeError if every prompt failed."""
        self.member.record, self.member.session.costs = record, joined_costs(pieces)
        found = {**provenance(self.parts.target.device), **facts}
        result = run_result(self.member.session, record, status, found, machines(pieces))
        result.memory.peak_bytes = max(piece.peak_bytes for piece in pieces)
        return result, record.sums

    def _answers(self, groups: Sequence[Group]) -> dict[str, str]:
        """What `Requests.remember` has kept of these groups."""
        answers = self.cohort.requests.answers
        return {r.request.prompt_id: answers[r.request.prompt_id][-1] for group in groups for r in group.results}


def machines(pieces: Sequence[Piece]) -> Machines:
    """The machines of all workers. A worker's groups are in the order in which it decoded them."""
    order = sorted((piece for piece in pieces if piece.failure is None), key=lambda piece: piece.ended)
    places = {number: place for place, number in enumerate(sorted(piece.number for piece in order))}
    probes, groups = dict[int, Probes](), dict[int, list[int]]()
    for piece in order:
        probes.setdefault(piece.worker, Probes()).join(piece.probes)
        groups.setdefault(piece.worker, []).append(places[piece.number])
    return Machines("worker", probes, groups)


class WarningCollector(logging.Handler):
    """Keeps warnings, for the process that merges: it has the run's log."""

    def __init__(self, texts: list[str]):
        super().__init__(logging.WARNING)
        self.texts = texts

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextmanager
def said() -> Iterator[list[str]]:
    """The warnings that specbench logs inside this context."""
    texts: list[str] = []
    handler = WarningCollector(texts)
    logger = logging.getLogger("specbench")
    logger.addHandler(handler)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)


def without_group(piece: Piece) -> Piece:
    """A piece as `Shard.measure` needs it."""
    return replace(piece, group=None, answers={})
