"""When requests arrive: all at once, or over time as at a server."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic import Field

from specbench.errors import ConfigError
from specbench.settings import BaseSettings, Component

LONGEST_WAIT = 24 * 3600  # seconds until the last request arrives


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


class Poisson(Workload):
    """A Poisson process of `rate` requests per second, the same for all decoders and runs with this seed."""

    over_time = True
    rate: float

    class Settings(BaseSettings):
        rate: float = Field(ge=1e-6, le=1e6)

    def __init__(self, seed: int, rate: float):
        super().__init__(seed)
        self.rate = rate

    def refuse(self, prompts: Sequence[Any]) -> None:
        requests = sum(len(prompt.turns) for prompt in prompts)
        if self.arrivals(requests)[-1] > LONGEST_WAIT:
            raise ConfigError(
                f"the workload's last request of {requests} would arrive after more than {LONGEST_WAIT // 3600} hours: "
                "choose a higher workload.rate, or a lower data.limit"
            )

    def arrivals(self, requests: int, segment: int = 0) -> list[float]:
        gaps = np.random.default_rng([self.seed, segment]).exponential(1 / self.rate, requests)
        return [float(second) for second in np.cumsum(gaps)]
