"""The clock of both decoders: seconds of each part of a round, on the CPU or on a CUDA stream."""

import time
from collections.abc import Mapping
from enum import StrEnum
from itertools import pairwise
from typing import Any, NamedTuple

import torch


class Lap(StrEnum):
    """What a stretch of a round's time was spent on, or WALL."""

    DRAFT = "draft"
    VERIFY = "verify"  # the target's call
    READ_AGAIN = "read_again"  # of VERIFY, what a recurrent target reads once more after a rejection
    ACCEPT = "accept"  # the verdict, and committing its tokens
    HOST = "host"  # Python between the calls
    PREFILL = "prefill"  # reading prompts, by the target
    DRAFTER_PREFILL = "drafter_prefill"  # and by the drafter
    RECORD = "record"  # measuring betas and metrics: no part of decoding
    IDLE = "idle"  # waiting for requests to arrive
    WALL = "wall"  # DRAFT, VERIFY, ACCEPT and HOST together, by the slower of host and device: on a CPU their sum


Laps = Mapping[Lap, float]  # seconds
DECODING = (Lap.DRAFT, Lap.VERIFY, Lap.ACCEPT, Lap.HOST)
READING = (Lap.PREFILL, Lap.DRAFTER_PREFILL)
KEPT = (*DECODING, Lap.WALL, *READING)  # what is stored of a round


def decoding_seconds(laps: Laps) -> float:
    """Seconds of a round in DRAFT, VERIFY, ACCEPT and HOST: without prefill, recording and idle time."""
    return sum(seconds for lap, seconds in laps.items() if lap in DECODING)


class Clock:
    """What the decoding loops call at the end of each part of a round. This one measures nothing."""

    def start(self) -> None:
        """Begins a new round."""

    def lap(self, name: Lap, more: bool = False) -> None:
        """Adds the time since the last mark to lap `name` of this round; `more` of what follows is of its kind."""

    def now(self) -> float:
        """Seconds of a clock that stands still while a round is recorded: requests arrive and wait by it."""
        return time.perf_counter()


class Mark(NamedTuple):
    """The end of a lap, by the host's clock and, on CUDA, by an event of the device."""

    lap: Lap
    host: float  # seconds
    event: Any = None


class Timer(Clock):
    """Measures the laps of one round after another, in seconds. On CUDA an event is recorded at each lap and read only
    in `rounds`, so no lap waits. Recording and prefill have to be done before the next lap begins."""

    def __init__(self, device: torch.device):
        self._device, self._cuda = device, device.type == "cuda"
        self._rounds: list[list[Mark]] = []
        self._launched = False  # whether `launch` was called since the last lap
        self._recorded = 0.0  # seconds of the host's clock that recording has taken

    def start(self) -> None:
        self._wait()
        last = self._rounds[-1] if self._rounds else []
        if last and last[-1].lap is Lap.RECORD:  # the device's part of it is done now, after a wait
            self._recorded += time.perf_counter() - last[-2].host
        self._rounds.append([])
        self._mark(Lap.HOST)
        self._launched = False

    def lap(self, name: Lap, more: bool = False) -> None:
        """As in the base class. Prompts are read to the end before the next lap begins, unless `more` are read."""
        if name in READING and not more:
            self._wait()
        self._mark(name)
        self._launched = False

    def launch(self) -> None:
        """Called by an executor when a phase is prepared and its work goes to the device in one piece, as a CUDA graph:
        the time since the last lap was Python's (HOST). Later phases of the same lap are part of that lap."""
        if self._cuda and not self._launched:
            self._mark(Lap.HOST)
            self._launched = True

    def now(self) -> float:
        """Seconds of the host's clock, without what recording took in the rounds before this one."""
        return time.perf_counter() - self._recorded

    def rounds(self) -> list[dict[Lap, float]]:
        """Seconds by lap, one dict per round; waits for the device."""
        self._wait()
        return [_laps(marks) for marks in self._rounds]

    def _mark(self, name: Lap) -> None:
        event = None
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
        self._rounds[-1].append(Mark(name, time.perf_counter(), event))

    def _wait(self) -> None:
        if self._cuda:
            torch.cuda.synchronize(self._device)


def _laps(marks: list[Mark]) -> dict[Lap, float]:
    """Seconds by lap: those of the device, if it has a clock, and WALL."""
    seconds: dict[Lap, float] = {}
    hosts = 0.0  # seconds of the host's clock in DECODING
    for before, now in pairwise(marks):
        host = now.host - before.host
        lap = host if now.event is None else before.event.elapsed_time(now.event) / 1e3
        seconds[now.lap] = seconds.get(now.lap, 0.0) + lap
        if now.lap is Lap.READ_AGAIN:
            seconds[Lap.VERIFY] = seconds.get(Lap.VERIFY, 0.0) + lap
        hosts += host if now.lap in (*DECODING, Lap.READ_AGAIN) else 0.0
    if any(lap in DECODING for lap in seconds):
        seconds[Lap.WALL] = max(hosts, decoding_seconds(seconds))
    return seconds
