"""Requests that arrive over time, as at a server."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic import Field

from specbench.errors import ConfigError
from specbench.policies.workload import Workload
from specbench.settings import BaseSettings

LONGEST_WAIT = 24 * 3600  # seconds until the last request arrives


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
