"""The workload in which requests arrive over time, as at a server."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from specbench.settings import BaseSettings, setting
from specbench.workloads.workload import Workload


class Poisson(Workload):
    """A Poisson process of `rate` requests per second, the same for every decoder of a run and for every run with this
    seed. For `spike_length` requests from number `spike_from` on (counted from 0) the rate is `spike` times as high."""

    over_time = True

    @dataclass
    class Settings(BaseSettings):
        rate: float = setting(ge=1e-6, le=1e6)
        spike: float = setting(ge=1e-6, le=1e6)
        spike_from: int = setting(ge=0, le=10**9)
        spike_length: int = setting(ge=0, le=10**9)

    def __init__(self, seed: int, rate: float, spike: float = 1.0, spike_from: int = 0, spike_length: int = 0):
        self.seed, self.rate, self.spike = seed, rate, spike
        self.spiked = slice(spike_from, spike_from + spike_length)

    @classmethod
    def from_settings(cls, settings: Any, seed: int) -> "Poisson":
        return cls(seed, **vars(settings))

    def arrivals(self, requests: int) -> list[float]:
        rates = np.full(requests, self.rate)
        rates[self.spiked] *= self.spike
        gaps = np.random.default_rng(self.seed).exponential(size=requests) / rates
        return [float(second) for second in np.cumsum(gaps)]
