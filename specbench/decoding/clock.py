"""The clock of both decoders: seconds of each part of a round, on the CPU or on a CUDA stream."""

import operator
import time
from collections.abc import Callable, Mapping
from enum import StrEnum
from itertools import pairwise
from typing import Any, Protocol

import torch


class Lap(StrEnum):
    """A part of a round: what a stretch of its time was spent on."""

    DRAFT = "draft"
    VERIFY = "verify"  # the target's call
    ACCEPT = "accept"  # the verdict, and committing its tokens
    HOST = "host"  # Python between the calls
    PREFILL = "prefill"  # reading prompts
    RECORD = "record"  # measuring betas and metrics: no part of decoding
    IDLE = "idle"  # waiting for requests to arrive


Laps = Mapping[Lap, float]  # seconds
DECODING = (Lap.DRAFT, Lap.VERIFY, Lap.ACCEPT, Lap.HOST)


def decoding_seconds(laps: Laps) -> float:
    """Seconds of a round in DRAFT, VERIFY, ACCEPT and HOST: without prefill, recording and idle time."""
    return sum(seconds for lap, seconds in laps.items() if lap in DECODING)


class Clock(Protocol):
    """Interface of the clocks that the decoding loops call."""

    def start(self) -> None:
        """Begins a new round."""

    def lap(self, name: Lap) -> None:
        """Adds the time since the last mark to lap `name` of this round."""


class NoClock:
    """A clock that measures nothing."""

    def start(self) -> None:
        """Does nothing."""

    def lap(self, name: Lap) -> None:
        """Does nothing."""


class Stopwatch:
    """Measures the laps of one round after another, in seconds.

    On CUDA an event is recorded at each lap and read only in `rounds`, so timing adds no host synchronisation.
    """

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._mark: Callable[[], Any] = _cuda_event if self._cuda else time.perf_counter
        self._rounds: list[list[tuple[Lap, Any]]] = []

    def start(self) -> None:
        """Begins a new round."""
        self._rounds.append([(Lap.HOST, self._mark())])

    def lap(self, name: Lap) -> None:
        """Adds the time since the last mark to lap `name` of this round."""
        self._rounds[-1].append((name, self._mark()))

    def rounds(self) -> list[dict[Lap, float]]:
        """Seconds by lap, one dict per round. On CUDA it waits for the device."""
        if self._cuda and self._rounds:
            torch.cuda.synchronize()
        between = _event_seconds if self._cuda else operator.sub
        return [_laps(marks, between) for marks in self._rounds]


def _cuda_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _event_seconds(now: torch.cuda.Event, before: torch.cuda.Event) -> float:
    milliseconds: float = before.elapsed_time(now)
    return milliseconds / 1e3


def _laps(marks: list[tuple[Lap, Any]], between: Callable[[Any, Any], float]) -> dict[Lap, float]:
    """Seconds by lap; between(now, before) is the time in seconds from one mark to the next."""
    seconds: dict[Lap, float] = {}
    for (_, before), (name, now) in pairwise(marks):
        seconds[name] = seconds.get(name, 0.0) + between(now, before)
    return seconds
