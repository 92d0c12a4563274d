"""Continuous batching: requests wait in a queue, and a row whose text has ended goes to the next request at once.

Before each round the decoder calls the queue (`feed`), which collects the texts that have ended, admits requests while
rows and cache columns are free, and reads a chunk of their prompts.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from specbench.decoding.model import Model
from specbench.decoding.state import Job, State
from specbench.decoding.timer import Clock, Lap


class CacheTooSmallError(Exception):
    """A request needs more cache columns than the cache can have."""


@dataclass
class RequestTimes:
    """When a request arrived, got a row, and got its first and last token: seconds since decoding began, by a clock
    that stands still while rounds are recorded."""

    arrived: float
    admitted: float = 0.0  # got a row
    first_token: float = 0.0
    finished: float = 0.0


@dataclass
class Output:
    """What was decoded for a job."""

    tokens: list[int] = field(default_factory=list)  # generated tokens
    times: RequestTimes | None = None  # only if requests arrive over time


class Queue:
    """The `feed` of both decoding loops; `outputs` holds what was decoded. `models` are those with a cache: the target,
    and the drafter's if it has one. Before each round at most about `prefill_chunk` prompt tokens are read. `spare`
    cache columns beyond a job's limit take the guesses of its last round. `arrivals`, in seconds from the first call
    and in order, says when each job arrives. Without it all jobs are there at once, and the longest go first, so that
    rows beside each other are alike."""

    def __init__(
        self, jobs: Sequence[Job], models: Sequence[Model], prefill_chunk: int, spare: int,
        arrivals: Sequence[float] | None = None,
    ):  # fmt: skip
        self.jobs, self.models, self.prefill_chunk, self.spare = jobs, models, prefill_chunk, spare
        self.arrivals = arrivals
        self.outputs = [Output(times=RequestTimes(when)) for when in arrivals] if arrivals else [Output() for _ in jobs]
        self.coming = [] if arrivals is None else list(range(len(jobs)))
        longest_first = sorted(range(len(jobs)), key=lambda job: -jobs[job].limit)
        self.waiting = longest_first if arrivals is None else []  # jobs without a row, in order
        self.reading: list[int] = []  # rows whose prompt is being read, in order
        self.encoded: set[int] = set()  # of them, those whose input the encoders have read
        self.began: float | None = None

    def __call__(self, state: State, clock: Clock) -> bool:
        """Collects, admits and reads; returns whether any row is active. Raises CacheTooSmallError."""
        if self.arrivals is not None:
            self._watch(state, clock)
        self._collect(state)
        if self.arrivals is not None:
            self._arrive(state, clock)
        if self.waiting:
            self._admit(state, clock)
        state.waiting = len(self.waiting)
        clock.lap(Lap.HOST)
        while self.reading:
            self._read(state, clock)
            clock.lap(Lap.PREFILL)
            if any(state.active):
                break
        return any(state.active)

    def _now(self, clock: Clock) -> float:
        """Seconds since the first call."""
        if self.began is None:
            self.began = clock.now()
        return clock.now() - self.began

    def _watch(self, state: State, clock: Clock) -> None:
        """Notes the time for each row whose first token is there, and as the time of its last token so far."""
        now = self._now(clock)
        for row, owner in enumerate(state.owners):
            if owner >= 0 and state.lengths[row] > state.prompt_lengths[row]:
                times = self.outputs[owner].times
                assert times is not None
                times.first_token = times.first_token or now
                times.finished = now

    def _arrive(self, state: State, clock: Clock) -> None:
        """Moves requests that have arrived to the waiting list; sleeps until the next if there is nothing to decode."""
        assert self.arrivals is not None
        idle = not any(owner >= 0 for owner in state.owners) and not self.waiting
        if idle and self.coming:
            clock.lap(Lap.HOST)
            time.sleep(max(0.0, self.arrivals[self.coming[0]] - self._now(clock)))
            clock.lap(Lap.IDLE)
        while self.coming and self.arrivals[self.coming[0]] <= self._now(clock):
            self.waiting.append(self.coming.pop(0))

    def _collect(self, state: State) -> None:
        """Stores the tokens of rows that ended, and frees these rows."""
        idle = [row for row, owner in enumerate(state.owners) if owner >= 0 and not state.active[row]]
        ended = [row for row in idle if row not in self.reading]
        if not ended:
            return
        rows = state.new_tokens()
        for row in ended:
            self.outputs[state.owners[row]].tokens = rows[row]
            for model in self.models:
                model.release(row)
        state.retire(ended)

    def _admit(self, state: State, clock: Clock) -> None:
        """Gives free rows to waiting requests, in order, while they fit into every cache."""
        free = [row for row, owner in enumerate(state.owners) if owner < 0]
        taken: dict[int, int] = {}  # by row, the number of its request
        for row in free:
            job = self.jobs[self.waiting[0]] if self.waiting else None
            if job is None or not all(model.may_admit(job, job.limit + self.spare) for model in self.models):
                break
            taken[row] = self.waiting.pop(0)
            for model in self.models:
                model.admit(row, job, job.limit + self.spare)
            times = self.outputs[taken[row]].times
            if times is not None:
                times.admitted = self._now(clock)
        if taken:
            state.admit([self.jobs[owner] for owner in taken.values()], [*taken], [*taken.values()])
            self.reading += taken
        elif len(free) == state.batch_size:
            job = self.jobs[self.waiting[0]]
            raise CacheTooSmallError(
                f"a request of {len(job.tokens)} prompt tokens needs {job.limit + self.spare} cache columns, more than "
                "cache.blocks holds in all: raise it, or lower max_new_tokens"
            )

    def _read(self, state: State, clock: Clock) -> None:
        """Reads at most about `prefill_chunk` prompt tokens; for all rows together if they all begin."""
        if len(self.reading) == state.batch_size and not any(any(model.cached) for model in self.models):
            for row in self.reading:
                self._encode(state, row, clock)
            for model in self.models:
                model.prefill(state, chunk=max(1, self.prefill_chunk // state.batch_size))
                self._lap(model, clock)
            self._begin(state, list(self.reading))
            return
        budget = self.prefill_chunk
        while self.reading and budget > 0:
            row = self.reading[0]
            budget -= self._encode(state, row, clock)
            end = state.prompt_lengths[row] - 1
            begin = min(model.cached[row] for model in self.models)
            upto = min(end, begin + budget)
            for model in self.models:
                if model.cached[row] < upto:
                    model.read(state, row, model.cached[row], upto)
                    self._lap(model, clock)
            budget -= max(1, upto - begin)
            if upto == end:
                self._begin(state, [row])

    def _encode(self, state: State, row: int, clock: Clock) -> int:
        """Has the encoders read a row's input, once and as a whole. Returns the number of tokens read."""
        job = self.jobs[state.owners[row]]
        if job.encoder_input is None or row in self.encoded:
            return 0
        self.encoded.add(row)
        for model in self.models:
            if model.encode(row, job):
                self._lap(model, clock)
        return len(job.encoder_input)

    def _lap(self, model: Model, clock: Clock) -> None:
        """A model has read: the first one is the target."""
        clock.lap(Lap.PREFILL if model is self.models[0] else Lap.DRAFTER_PREFILL, more=True)

    def _begin(self, state: State, rows: list[int]) -> None:
        """Makes these rows active: their prompts have been read."""
        self.reading = [row for row in self.reading if row not in rows]
        self.encoded -= set(rows)
        for row in rows:
            for model in self.models:
                model.prompt_read(row, self.jobs[state.owners[row]])
        state.begin(rows)
