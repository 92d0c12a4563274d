"""Requests that arrive over time, as at a server."""

from dataclasses import dataclass

import numpy as np

from specbench.context import Context
from specbench.settings import setting


class Poisson:
    """A Poisson process of `rate` requests per second, the same one for every decoder of a run and
    for every run with this seed. From the request `spike_from` on (counted from 0), `spike` times
    the rate, for `spike_length` requests."""

    @dataclass
    class Settings:
        rate: float = setting(gt=0)
        spike: float = setting(gt=0)
        spike_from: int = setting(ge=0)
        spike_length: int = setting(ge=0)

    def __init__(self, settings: Settings, context: Context):
        self.settings, self.rate, self.seed = settings, settings.rate, context.seed

    def arrivals(self, requests: int) -> list[float]:
        """Seconds from the start at which each request comes."""
        s = self.settings
        rates = np.full(requests, s.rate)
        rates[s.spike_from : s.spike_from + s.spike_length] *= s.spike
        gaps = np.random.default_rng(self.seed).exponential(size=requests) / rates
        return np.cumsum(gaps).tolist()
