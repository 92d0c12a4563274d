"""workers=N: gives the groups of a run to workers, and takes those of a worker that dies to the others."""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from specbench.config.devices import named_device
from specbench.config.validate import ValidatedConfig
from specbench.contrib.ray.data_shard import Groups, Opened, without_group
from specbench.contrib.ray.merge import Merger, Piece
from specbench.contrib.ray.pool import DiedError, Pool
from specbench.contrib.ray.worker_handle import WorkerHandle
from specbench.contrib.ray.worker_stats import worker_numbers
from specbench.data.sources import UNKNOWN
from specbench.errors import ConfigError, IncompleteError
from specbench.results.schema import RunResult
from specbench.run.signals import allow_signals
from specbench.stats.records import RunRecord

log = logging.getLogger(__name__)
LOOK = 0.2  # seconds between two looks: a signal just before a wait without end would go unseen
TRIES = 3  # workers that may die of a group before its requests count as failed
PATIENCE = 300  # seconds without a worker
JOINING = 30  # seconds in which the first worker of a machine waits for the others, whose memory it looks for too
FUTILE = 3  # workers that may die, for each one that is wanted, before one finishes a group


class Team:
    """The workers of a run. Nothing of the run is computed here: one of them measures what all have decoded."""

    def __init__(
        self, checked: ValidatedConfig, pool: Pool, workers: int, announce: Callable[[str], None] = lambda text: None
    ):
        """Starts them. `workers` is how many there are at a time; `announce` is told what memory they need."""
        self.checked, self.pool, self.wanted, self.announce = checked, pool, workers, announce
        self.hands: list[WorkerHandle] = []
        self.alive: list[WorkerHandle] = []  # those of them that have not died
        self.calls: dict[Any, WorkerHandle] = {}  # that are not over
        self.known: Opened | None = None
        self.tokenizer: Any = None
        self.first: dict[str, WorkerHandle] = {}  # by machine, the worker that loads before the others
        self.turn, self.turns = 0, dict[int, Groups]()
        self.waiting: deque[int] = deque()  # groups that nobody decodes
        self.deaths: Counter[int] = Counter()  # by group
        self.futile = 0  # workers that have died since a group was finished
        self.answers: dict[str, list[str]] = {}
        self.device = named_device(checked.root.device).type  # the command's, whatever a worker's machine has
        found = checked.identity()
        self.code, self.sources = found.code, dict(found.sources)
        self.merger: Merger
        self.to_measure: tuple[Any, ...] = ()  # the arguments of `Worker.measure`
        self.measured: Any = None  # what it returned
        self.took: Callable[[Piece], None] = lambda piece: None
        self.began = self.heard = time.monotonic()  # when a worker was last known to run
        for _ in range(workers):
            self._start()

    def load(self) -> Opened:
        """Returns when the first worker has loaded the models. Raises ConfigError, also for what another one says
        later, or IncompleteError if all of them die."""
        self._until(lambda: self.known is not None)
        assert self.known is not None
        return self.known

    def decode(self, took: Callable[[Piece], None]) -> None:
        """Decodes all groups; `took` is called with each of them as it comes. Raises as `load` does, or
        KeyboardInterrupt after a signal."""
        self.took = took
        assert self.known is not None
        for turn in range(self.known.turns):
            self.turn = turn
            self._until(lambda: self.turn in self.turns)
            self.waiting.extend(self.turns[self.turn].numbers)
            self._until(lambda: len(self.merger.pieces) == self.turns[self.turn].numbers.stop)

    def measure(self, status: str, facts: Mapping[str, Any]) -> tuple[RunResult, RunRecord]:
        """Everything that is measured of what was decoded; signals wait. After a signal the first worker that ends its
        group does it, and another signal until then raises KeyboardInterrupt. Raises RuntimeError if every prompt
        failed."""
        complete = status == "complete"
        self.waiting.clear()
        if not complete:
            self._until(lambda: any(hand.call is None and hand.turn >= 0 for hand in self.alive))
        merger = self.merger
        record = merger.complete(self.turns[self.turn].numbers.stop) if complete else merger.so_far()
        record.too_long = max((groups.too_long for groups in self.turns.values()), default=0)
        pieces = merger.in_order()
        self.to_measure = record, [without_group(piece) for piece in pieces], status, dict(facts)
        self._until(lambda: self.measured is not None, nullcontext)
        result, record.sums = self.measured
        result.workers = worker_numbers(self.hands, pieces, record)
        for hand in self.hands:
            if hand.place is not None and hand.place.shared and result.machine is not None:
                result.machine.steady = False
                result.machine.reasons += [f"worker {hand.number}: {why}" for why in hand.place.shared]
        if len(hosts := {worker.host for worker in result.workers}) > 1 and result.executor:
            result.notes.append(
                f"workers ran on {len(hosts)} machines, each of which chose its products by its own times: rounding, "
                "and so texts, may differ between them (executor.choices=FILE or executor=eager prevents that)"
            )
        if len(devices := dict.fromkeys(worker.device for worker in result.workers)) > 1:
            result.notes.append(
                f"workers ran on {' and '.join(devices)}: rounding, and so texts, may differ between them"
            )
        return result, record

    # -- What the workers do --------------------------------------------------------------------

    def _start(self) -> None:
        number = len(self.hands) + 1
        hand = WorkerHandle(number, self.pool.start(number))
        self.hands.append(hand)
        self.alive.append(hand)

    def _until(
        self, over: Callable[[], bool], waiting: Callable[[], AbstractContextManager[None]] = allow_signals
    ) -> None:
        """Gives out work and takes results until `over` says so. `waiting` is what a signal does meanwhile."""
        while not over():
            self._give()
            if not self.calls:
                raise IncompleteError(
                    f"all workers died ({len(self.hands)} were started), {self._so_far()}: see run.log"
                )
            if any(hand.host for hand in self.alive):
                self.heard = time.monotonic()
            if time.monotonic() - self.heard > PATIENCE:
                raise IncompleteError(f"no worker could be started within {PATIENCE} s, {self._so_far()}: Ray has no "
                                      "room for one")  # fmt: skip
            with waiting():
                ready = self.pool.wait([*self.calls], LOOK)
            for call in ready:
                self._take(self.calls.pop(call))

    def _so_far(self) -> str:
        """What is finished, in words."""
        pieces = self.merger.pieces.values() if self.known is not None else ()
        done = sum(len(piece.group.results) for piece in pieces if piece.group)
        return f"and {done} request{'s are' if done != 1 else ' is'} finished"

    def _give(self) -> None:
        for hand in self.alive:
            if hand.call is None and (next_call := self._next(hand)) is not None:
                hand.doing, *arguments = next_call
                hand.call = self.pool.call(hand.worker, hand.doing, *arguments)
                self.calls[hand.call] = hand

    def _next(self, hand: WorkerHandle) -> tuple[Any, ...] | None:
        """The method that an idle worker is to be called with, and its arguments."""
        if not hand.host:
            return ("host",)
        if hand.place is None:
            return self._load(hand)
        if hand.turn < self.turn:
            hand.opening = self.turn  # the others may be in a later one when it has opened this
            return "open", self.turn, self.answers
        if self.to_measure:
            busy = any(other.doing == "measure" and other.call is not None for other in self.alive)
            return None if busy or self.measured is not None else ("measure", *self.to_measure)
        if not self.waiting:
            return None
        hand.group = self.waiting.popleft()
        if self.deaths[hand.group] >= TRIES:
            return "fail", hand.group, f"{self.deaths[hand.group]} workers died while they decoded it"
        return "decode", hand.group, self.merger.limits

    def _load(self, hand: WorkerHandle) -> tuple[Any, ...] | None:
        """The first worker of a machine loads and warms up alone: what it finds out and compiles, the others take from
        the disk, so that all of them compute the same."""
        first, beside = self.first.setdefault(hand.host, hand), 1
        if first.lost and first.turn < 0:
            first = self.first[hand.host] = hand
        if first is not hand and first.turn < 0:
            return None
        if first is hand:
            if not all(other.host for other in self.alive) and time.monotonic() - self.began < JOINING:
                return None
            beside = sum(other.host == hand.host and other.place is None for other in self.alive)
        waits = hand.number > self.wanted  # one that has died may still have its cores
        return "load", self.checked, self.device, self.pool.cores, str(Path.cwd()), beside, waits

    def _take(self, hand: WorkerHandle) -> None:
        """Takes what a worker's call has returned."""
        call, hand.call = hand.call, None
        try:
            result = self.pool.result(call)
        except DiedError as error:
            self._lose(hand, error)
            return
        if hand.doing == "host":
            hand.host = result
        elif hand.doing == "load":
            hand.place, opened, tokenizer = result
            self._refuse_others(hand)
            if self.known is None:
                self.announce(f"{self.wanted} workers; {hand.place.memory}")
                self.known, self.tokenizer = opened, tokenizer
                self.merger = Merger(self.checked.root.verdict_tokens, opened.reads_different, opened.columns)
        elif hand.doing == "open":
            if self.turns.setdefault(hand.opening, result) != result:
                raise ConfigError(f"the worker on {hand.host} has other prompts than the first one: their file must be "
                                  "the same on all machines")  # fmt: skip
            hand.turn = hand.opening
            hand.begun = hand.begun or time.time()
        elif hand.doing == "measure":
            self.measured = result
        else:
            self._keep(hand, result)

    def _refuse_others(self, hand: WorkerHandle) -> None:
        """Raises ConfigError if a worker's programs or files are other ones than the command's, for which results are
        stored. Which commit a name of the hub is, the first worker says where the command does not know."""
        assert hand.place is not None
        ours, theirs = self.code, hand.place.code
        if other := sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name)):
            raise ConfigError(f"the worker on {hand.host} has another version of {other[0]} than this process: install "
                              "the same on all machines")  # fmt: skip
        for name, found in hand.place.sources.items():
            if self.sources.get(name, UNKNOWN).startswith(UNKNOWN):
                self.sources[name] = found
            elif found != self.sources[name] and not found.startswith(UNKNOWN):
                raise ConfigError(f"the worker on {hand.host} finds other files as {name} than this process: they must "
                                  "be the same on all machines, with their times (cp -p, rsync -a)")  # fmt: skip

    def _keep(self, hand: WorkerHandle, piece: Piece) -> None:
        if self.to_measure:  # without it, after a signal
            return
        for warning in piece.warnings:
            log.warning("worker %d: %s", hand.number, warning)
        for prompt, answer in piece.answers.items():
            self.answers.setdefault(prompt, []).append(answer)
        self.merger.add(piece)
        self.futile = 0 if piece.group is not None else self.futile
        self.took(piece)

    def _lose(self, hand: WorkerHandle, error: DiedError) -> None:
        """A worker has died: what it had is for the others, and another one takes its place."""
        hand.lost = True
        self.alive.remove(hand)
        self.pool.end(hand.worker)  # it may run on, out of reach, with its cores
        log.warning("worker %d died while it was at %s (%s)", hand.number, hand.doing, error)
        if hand.doing in ("decode", "fail"):
            self.deaths[hand.group] += 1
            self.waiting.appendleft(hand.group)
        self.futile += 1
        if self.futile < FUTILE * self.wanted:
            self._start()
