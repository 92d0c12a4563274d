"""Where the time of a run goes: wall-clock seconds of its phases."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager


def summed(every: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Seconds of several processes by phase."""
    names = dict.fromkeys(name for seconds in every for name in seconds)
    return {name: sum(seconds.get(name, 0.0) for seconds in every) for name in names}


class Phases:
    """Seconds by phase, each in the order of its first begin. No second is in two phases: while an inner one lasts, the
    outer one stands still. Time while no phase is open is in none."""

    def __init__(self, begun: float | None = None):
        """`begun`, by `time.perf_counter`, is when the phase `start` began."""
        self._open: list[str] = []
        self._since = time.perf_counter()
        self.seconds: dict[str, float] = {} if begun is None else {"start": self._since - begun}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Inside this context time is counted as of the phase `name`."""
        self._turn()
        self._open.append(name)
        self.seconds.setdefault(name, 0.0)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    def _turn(self) -> None:
        """Adds the time since the last turn to the innermost phase."""
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now
