"""The workload in which requests arrive over time, as at a server."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specbench.data.prompts import Prompt
from specbench.errors import ConfigError
from specbench.policies.workload.base import Limits, Workload
from specbench.settings import BaseSettings, setting

LONGEST_WAIT = 24 * 3600  # seconds until the last request arrives


class Poisson(Workload):
    """A Poisson process of `rate` requests per second, the same for every decoder of a run and for every run with this
    seed; of several rates each segment has one. In every segment the rate is `spike` times as high for `spike_length`
    requests from number `spike_from` on (counted from 0)."""

    over_time = True

    @dataclass
    class Settings(BaseSettings):
        rate: float | list[float] = setting(ge=1e-6, le=1e6)
        segment: int = setting(ge=0, le=10**9)
        spike: float = setting(ge=1e-6, le=1e6)
        spike_from: int = setting(ge=0, le=10**9)
        spike_length: int = setting(ge=0, le=10**9)
        slo_first_token: float = setting(ge=1e-6, le=1e6, zero=True)
        slo_per_token: float = setting(ge=1e-6, le=1e6, zero=True)

        def check(self, prefix: str) -> None:
            """Raises ConfigError if a rate is given twice, or none."""
            if isinstance(self.rate, list) and len({*self.rate}) != max(1, len(self.rate)):
                raise ConfigError(f"{prefix}rate={self.rate} is not allowed: it must be a number, or different numbers")

    def __init__(
        self,
        seed: int,
        rate: float | Sequence[float],
        segment: int = 0,
        spike: float = 1.0,
        spike_from: int = 0,
        spike_length: int = 0,
        slo_first_token: float = 0.0,
        slo_per_token: float = 0.0,
    ):
        self.seed, self.spike = seed, spike
        self.rates = (rate,) if isinstance(rate, float | int) else tuple(rate)
        self.spiked = slice(spike_from, spike_from + spike_length)
        self.segment = max(segment, self.spiked.stop if spike_length else 0)
        self.limits = Limits(slo_first_token, slo_per_token)

    @classmethod
    def from_settings(cls, settings: Any, seed: int) -> "Poisson":
        return cls(seed, **vars(settings))

    def refuse(self, prompts: Sequence[Prompt], rows: int) -> None:
        from specbench.config.components import segment_size  # which loads torch

        requests = sum(len(prompt.turns) for prompt in prompts)
        seconds = max(self.arrivals(requests, segment)[-1] for segment in range(len(self.rates)))
        if not seconds <= LONGEST_WAIT:
            raise ConfigError(
                f"the workload's last request of {requests} would arrive after {seconds / 3600:,.0f} hours: it must be "
                f"{LONGEST_WAIT // 3600} at most, so choose a higher workload.rate or workload.spike, or a lower "
                "data.limit"
            )
        needed = segment_size(rows, self)
        if len(self.rates) > 1 and len(prompts) < len(self.rates) * needed:
            raise ConfigError(
                f"workload.rate has {len(self.rates)} rates, each of which needs a segment of {needed} requests, and "
                f"there are {len(prompts)}: choose more prompts, fewer rates, or a lower batch_size or workload.segment"
            )

    def arrivals(self, requests: int, segment: int = 0) -> list[float]:
        rates = np.full(requests, self.rate(segment))
        rates[self.spiked] *= self.spike
        gaps = np.random.default_rng([self.seed, segment]).exponential(size=requests) / rates
        return [float(second) for second in np.cumsum(gaps)]
