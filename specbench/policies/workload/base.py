"""Base class of workloads: when requests arrive."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specbench.component import Selections
from specbench.data.prompts import Prompt
from specbench.decoding.component import Component


@dataclass(frozen=True)
class Limits:
    """What a request may wait, in seconds, to count for goodput; 0 is no limit."""

    first_token: float = 0.0  # from its arrival
    per_token: float = 0.0  # mean over the tokens after its first round


class Workload(Component):
    """The arrival times of requests. `over_time` says whether requests arrive while others are decoded. Then a run's
    requests are decoded in segments, each of which begins with an empty queue, and both decoders take turns from one
    segment to the next."""

    over_time: bool = False
    rates: Sequence[float] = ()  # requests per second, which segments have in turn; empty if there is no such number
    segment: int = 0  # requests of a segment at least
    limits: Limits = Limits()

    @classmethod
    def from_settings(cls, settings: Any, seed: int) -> "Workload":
        """Builds the workload; by default it has no settings."""
        return cls()

    @classmethod
    def refuses(cls, settings: Any, run: Selections) -> str | None:
        if cls.over_time and run.workers > 1:
            return f"with workers={run.workers}: its requests wait in one queue, use workload=all_at_once"
        return None

    def refuse(self, prompts: Sequence[Prompt], rows: int) -> None:
        """Raises ConfigError if the requests of these prompts cannot arrive so, with a batch of so many rows."""

    def arrivals(self, requests: int, segment: int = 0) -> list[float] | None:
        """The second, from the start of this segment (counted from 0), at which each of its requests arrives, in
        order; None if all are there at once."""
        return None

    def rate(self, segment: int) -> float | None:
        """The rate of a segment, None if there are none. From one pass through the rates to the next their order is
        reversed, so that at each of them either decoder comes first as often as the other."""
        if not self.rates:
            return None
        passes, place = divmod(segment, len(self.rates))
        return self.rates[-1 - place if passes % 2 else place]
