"""The clock of both decoders: seconds of each stage of a round, on the CPU or on a CUDA stream."""

import time
from enum import StrEnum
from itertools import pairwise
from typing import Any, NamedTuple

import torch


class Stage(StrEnum):
    """What a stretch of time was spent on. The first four are decoding."""

    DRAFT = "draft"
    VERIFY = "verify"  # the target's call
    ACCEPT = "accept"  # the verdict, and committing its tokens
    HOST = "host"  # Python between the calls
    PREFILL = "prefill"  # reading prompts, by the target
    DRAFTER_PREFILL = "drafter_prefill"  # and by the drafter
    RECORD = "record"  # measuring betas: no part of decoding
    IDLE = "idle"  # waiting for requests to arrive


DECODING = (Stage.DRAFT, Stage.VERIFY, Stage.ACCEPT, Stage.HOST)


class Clock:
    """What the decoding loops call at the end of each stage of a round. This one measures nothing."""

    def start(self) -> None:
        """Begins a new round."""

    def end(self, stage: Stage, event: Any = None) -> None:
        """Adds the time since the last mark to a stage of this round; it ended at this event of CUDA, else now."""

    def now(self) -> float:
        """Seconds of a clock that stands still while a round is recorded: requests arrive and wait by it."""
        return time.perf_counter()


class Mark(NamedTuple):
    """The end of a stage, by the host's clock and, on CUDA, by an event of the device."""

    stage: Stage
    host: float  # seconds
    event: Any = None


class Timer(Clock):
    """Measures the stages of one round after another, in seconds. On CUDA an event is recorded at the end of each and
    read only between rounds, so that no stage waits; recording and prefill are waited for before the next stage."""

    def __init__(self, device: torch.device):
        self._device, self._cuda = device, device.type == "cuda"
        self._rounds: list[dict[Stage, float]] = []  # those that are over
        self._marks: list[Mark] = []  # of the round that has begun
        self._recorded = 0.0  # seconds of the host's clock that recording has taken

    def start(self) -> None:
        self._wait()
        if self._marks:
            self._rounds.append(_seconds(self._marks))  # now: a graph's events are recorded again in the next round
            if self._marks[-1].stage is Stage.RECORD:  # the device's part of it is done now, after a wait
                self._recorded += time.perf_counter() - self._marks[-2].host
        self._marks = []
        self.end(Stage.HOST)

    def end(self, stage: Stage, event: Any = None) -> None:
        """As in the base class. Prompts are read to the end before the next stage begins."""
        if stage in (Stage.PREFILL, Stage.DRAFTER_PREFILL):
            self._wait()
        if self._cuda and event is None:
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
        self._marks.append(Mark(stage, time.perf_counter(), event))

    def now(self) -> float:
        """Seconds of the host's clock, without what recording took in the rounds before this one."""
        return time.perf_counter() - self._recorded

    def rounds(self) -> list[dict[Stage, float]]:
        """Seconds by stage, one dict per round, by the device's clock if it has one; waits for the device."""
        self._wait()
        return [*self._rounds, _seconds(self._marks)] if self._marks else []

    def _wait(self) -> None:
        if self._cuda:
            torch.cuda.synchronize(self._device)


def _seconds(marks: list[Mark]) -> dict[Stage, float]:
    """Seconds by stage between marks."""
    found: dict[Stage, float] = {}
    for before, now in pairwise(marks):
        on_host = now.event is None
        spent = now.host - before.host if on_host else before.event.elapsed_time(now.event) / 1e3
        found[now.stage] = found.get(now.stage, 0.0) + spent
    return found
