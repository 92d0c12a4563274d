"""One clock for both decoders: seconds between laps, by name, on the CPU or on a CUDA stream."""

import operator
import time
from collections.abc import Callable, Mapping
from enum import StrEnum
from itertools import pairwise
from typing import Any, Protocol

import torch


class Lap(StrEnum):
    """What a part of a round's time was spent on."""

    DRAFT = "draft"
    VERIFY = "verify"  # the target's call
    ACCEPT = "accept"  # the verdict, and its tokens appended to the text
    HOST = "host"  # Python between the calls
    PREFILL = "prefill"  # reading prompts
    RECORD = "record"  # measuring: no part of decoding
    IDLE = "idle"  # waiting for requests to arrive


Laps = Mapping[Lap, float]  # seconds
DECODING = (Lap.DRAFT, Lap.VERIFY, Lap.ACCEPT, Lap.HOST)


def decoding_seconds(laps: Laps) -> float:
    """Seconds of a round without reading prompts, recording, or waiting for requests."""
    return sum(seconds for lap, seconds in laps.items() if lap in DECODING)


class Clock(Protocol):
    """What the decoding loops tell a clock."""

    def start(self) -> None:
        """A new round begins."""

    def lap(self, name: Lap) -> None:
        """Everything since the last mark was `name`; a name that comes again is added up."""


class NoClock:
    """Measures nothing."""

    def start(self) -> None:
        """Nothing is noted."""

    def lap(self, name: Lap) -> None:
        """Nothing is noted."""


class Stopwatch:
    """Laps of one round after another.

    On CUDA an event is recorded at each lap and read only in `rounds`, so timing adds no host
    synchronisation.
    """

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._mark: Callable[[], Any] = _cuda_event if self._cuda else time.perf_counter
        self._rounds: list[list[tuple[Lap, Any]]] = []

    def start(self) -> None:
        self._rounds.append([(Lap.HOST, self._mark())])

    def lap(self, name: Lap) -> None:
        self._rounds[-1].append((name, self._mark()))

    def rounds(self) -> list[dict[Lap, float]]:
        """Seconds by lap, one entry per round."""
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
    """Seconds by lap, where between(now, before) are the seconds from one mark to the next."""
    seconds: dict[Lap, float] = {}
    for (_, before), (name, now) in pairwise(marks):
        seconds[name] = seconds.get(name, 0.0) + between(now, before)
    return seconds
