"""When requests arrive."""

from collections.abc import Sequence
from typing import Any

from specbench.settings import Component


class Workload(Component):
    """The arrival times of requests: here all at once, decoded as fast as rows become free. `over_time` says whether
    requests arrive while others are decoded. Then a run's requests are decoded in segments, each of which begins with
    an empty queue, and both decoders take turns from one segment to the next."""

    over_time: bool = False
    rate: float | None = None  # requests per second, if there is such a number

    def __init__(self, seed: int):
        self.seed = seed

    def refuse(self, prompts: Sequence[Any]) -> None:
        """Raises ConfigError if the requests of these prompts, which have `turns`, cannot arrive so."""

    def arrivals(self, requests: int, segment: int = 0) -> list[float] | None:
        """The second at which each request of this segment arrives, in order; None if all are there at its start."""
        return None
