"""One clock for both decoders: seconds between laps, by name, on the CPU or on a CUDA stream."""

import time
from collections.abc import Callable
from itertools import pairwise

import torch


class Stopwatch:
    """Laps of one round after another.

    On CUDA an event is recorded at each lap and read only in `rounds`, so timing adds no host
    synchronisation.
    """

    def __init__(self, device: torch.device):
        self._mark: Callable[[], object] = _cuda_event if device.type == "cuda" else time.perf_counter
        self._rounds: list[list[tuple[str, object]]] = []

    def start(self) -> None:
        """A new round begins."""
        self._rounds.append([("", self._mark())])

    def lap(self, name: str) -> None:
        """Everything since the last mark was `name`; a name that comes again is added up."""
        self._rounds[-1].append((name, self._mark()))

    def rounds(self) -> list[dict[str, float]]:
        """Seconds by lap name, one entry per round."""
        if self._rounds and not isinstance(self._rounds[0][0][1], float):
            torch.cuda.synchronize()
        return [_laps(marks) for marks in self._rounds]

    def total(self) -> float:
        """Seconds of all laps of all rounds."""
        return sum(sum(laps.values()) for laps in self.rounds())


def _cuda_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _laps(marks: list[tuple[str, object]]) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for (_, before), (name, now) in pairwise(marks):
        seconds[name] = seconds.get(name, 0.0) + _seconds(before, now)
    return seconds


def _seconds(before, now) -> float:
    return now - before if isinstance(now, float) else before.elapsed_time(now) / 1e3
