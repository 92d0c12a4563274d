"""Continuous batching: requests wait for a row, and a row whose text has ended goes to the next request at once.

Before each round the decoder calls the scheduler, which frees the rows of texts that have ended, admits requests while
rows and cache columns are free, and has the models read a chunk of their prompts.
"""

import time
from collections import abc
from collections.abc import Iterable
from typing import TYPE_CHECKING

from specbench.decoding.sequence import Sequence
from specbench.decoding.state import State
from specbench.decoding.timer import Clock, Stage

if TYPE_CHECKING:
    from specbench.decoding.protocols import Model


class CacheTooSmallError(Exception):
    """A request needs more cache columns than the cache can have."""


class Scheduler:
    """Admits requests to the rows of both decoding loops; `sequences` are copies of those given, which it decodes.
    `models` are those with a cache: the target, and the drafter's if it has one. Before each round at most about
    `prefill_chunk` prompt tokens are read. `spare` cache columns beyond a limit take the guesses of the last round.
    With `alone` each prompt is read by itself, in chunks at the same places. `arrivals`, in seconds and in order, says
    when each request arrives. Without it all are there at once, the longest first, so that rows are alike."""

    def __init__(
        self, sequences: Iterable[Sequence], models: "abc.Sequence[Model]", prefill_chunk: int, spare: int,
        arrivals: Iterable[float] | None = None, alone: bool = False,
    ):  # fmt: skip
        self.alone = alone
        self.sequences = [sequence.fresh(number) for number, sequence in enumerate(sequences)]
        self.models, self.prefill_chunk, self.spare = models, prefill_chunk, spare
        self.coming: list[Sequence] = []  # those that have not arrived, in order
        self.waiting: list[Sequence] = []  # those without a row, in order
        self.reading: list[int] = []  # rows whose prompt is being read, in order
        self.encoded: set[int] = set()  # of them, those whose input the encoders have read
        self.began: float | None = None
        if arrivals is None:
            self.waiting = sorted(self.sequences, key=lambda sequence: -sequence.limit)
            return
        self.coming = list(self.sequences)
        for sequence, when in zip(self.sequences, arrivals, strict=True):
            sequence.times = {"arrived": when, "admitted": 0.0, "first_token": 0.0, "finished": 0.0}

    def __call__(self, state: State, clock: Clock) -> bool:
        """Frees, admits and reads; returns whether any row is active. Raises CacheTooSmallError."""
        self._note_times(state, clock)
        self._free(state)
        self._arrive(state, clock)
        if self.waiting:
            self._admit(state, clock)
        state.waiting = len(self.waiting)
        clock.end(Stage.HOST)
        while self.reading:
            self._read(state, clock)
            clock.end(Stage.PREFILL)
            if any(state.active):
                break
        return any(state.active)

    def _now(self, clock: Clock) -> float:
        """Seconds since the first call."""
        if self.began is None:
            self.began = clock.now()
        return clock.now() - self.began

    def _note_times(self, state: State, clock: Clock) -> None:
        """Notes the time for each row whose first token is there, and as the time of its last token so far."""
        now = self._now(clock)
        for sequence in state.sequences:
            if sequence is not None and sequence.times and sequence.generated:
                sequence.times["first_token"] = sequence.times["first_token"] or now
                sequence.times["finished"] = now

    def _arrive(self, state: State, clock: Clock) -> None:
        """Moves requests that have arrived to those that wait; sleeps until the next if there is nothing to decode."""
        if not self.coming:
            return
        if not any(state.sequences) and not self.waiting:
            clock.end(Stage.HOST)
            time.sleep(max(0.0, self.coming[0].times["arrived"] - self._now(clock)))
            clock.end(Stage.IDLE)
        while self.coming and self.coming[0].times["arrived"] <= self._now(clock):
            self.waiting.append(self.coming.pop(0))

    def _free(self, state: State) -> None:
        """Frees the rows of texts that have ended."""
        occupied = [row for row, sequence in enumerate(state.sequences) if sequence is not None]
        ended = [row for row in occupied if not state.at(row).active and row not in self.reading]
        if not ended:
            return
        for row in ended:
            for model in self.models:
                model.release(row)
        state.retire(ended)

    def _admit(self, state: State, clock: Clock) -> None:
        """Gives free rows to waiting requests, in order, while they fit into every cache."""
        free = [row for row, sequence in enumerate(state.sequences) if sequence is None]
        admitted: dict[int, Sequence] = {}  # by row
        for row in free:
            if not self.waiting:
                break
            sequence = self.waiting[0]
            columns = sequence.limit + self.spare
            if not all(model.may_admit(sequence, columns) for model in self.models):
                break
            admitted[row] = self.waiting.pop(0)
            for model in self.models:
                model.admit(row, sequence, columns)
            if sequence.times:
                sequence.times["admitted"] = self._now(clock)
        if admitted:
            state.admit(admitted)
            self.reading += admitted
        elif len(free) == state.batch_size:
            sequence = self.waiting[0]
            raise CacheTooSmallError(
                f"a request of {len(sequence.tokens)} prompt tokens needs {sequence.limit + self.spare} cache columns, "
                "more than cache.blocks holds in all: raise it, or lower max_new_tokens"
            )

    def _read(self, state: State, clock: Clock) -> None:
        """Reads at most about `prefill_chunk` prompt tokens; for all rows together if they all begin."""
        chunk = self.prefill_chunk
        if len(self.reading) == state.batch_size and not any(any(model.cached) for model in self.models):
            for row in self.reading:
                self._encode(state, row, clock)
            if self.alone:
                for row in self.reading:
                    end = state.at(row).prompt_length - 1
                    for begin in range(0, end, chunk):
                        self._read_row(state, row, min(begin + chunk, end), clock)
            else:
                for model in self.models:
                    model.prefill(state, chunk=max(1, chunk // state.batch_size))
                    self._end(model, clock)
            self._begin(state, list(self.reading))
            return
        budget = chunk
        while self.reading and budget > 0:
            row = self.reading[0]
            budget -= self._encode(state, row, clock)
            end = state.at(row).prompt_length - 1
            begin = min(model.cached[row] for model in self.models)
            if self.alone and budget < min(chunk, end - begin):
                break
            upto = min(end, begin + (chunk if self.alone else budget))
            self._read_row(state, row, upto, clock)
            budget -= max(1, upto - begin)
            if upto == end:
                self._begin(state, [row])

    def _read_row(self, state: State, row: int, upto: int, clock: Clock) -> None:
        """Reads a row's prompt on to position `upto`, by each model in turn."""
        for model in self.models:
            if model.cached[row] < upto:
                model.read(state, row, model.cached[row], upto)
                self._end(model, clock)

    def _encode(self, state: State, row: int, clock: Clock) -> int:
        """Has the encoders read a row's input, once and as a whole. Returns the number of tokens read."""
        sequence = state.at(row)
        if sequence.encoder_input is None or row in self.encoded:
            return 0
        self.encoded.add(row)
        for model in self.models:
            if model.encode(row, sequence):
                self._end(model, clock)
        return len(sequence.encoder_input)

    def _end(self, model: "Model", clock: Clock) -> None:
        """A model has read: the first one is the target."""
        clock.end(Stage.PREFILL if model is self.models[0] else Stage.DRAFTER_PREFILL)

    def _begin(self, state: State, rows: list[int]) -> None:
        """Makes these rows active: their prompts have been read."""
        self.reading = [row for row in self.reading if row not in rows]
        self.encoded -= set(rows)
        for row in rows:
            for model in self.models:
                model.prompt_read(row, state.at(row))
        state.begin(rows)
