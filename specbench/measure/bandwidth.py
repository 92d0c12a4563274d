"""Measures memory bandwidth, which limits how fast a decoding step can be."""

import statistics
import time

import torch

READ_BYTES = 2**26  # the size of the buffer: more than a core's share of the caches


class BandwidthProbe:
    """Reads a buffer far larger than the caches, once per call. The calls are spread over a run, since other work on
    the machine changes the bandwidth that is left."""

    def __init__(self, device: torch.device):
        self.buffer = torch.ones(READ_BYTES // 4, device=device)
        self.copy = torch.empty_like(self.buffer) if device.type == "cuda" else self.buffer
        self.rates: list[float] = []

    def __call__(self) -> None:
        """Measures once."""
        self.rates.append(self._copy() if self.buffer.is_cuda else self._read())

    @property
    def bytes_per_second(self) -> float:
        """The median, in bytes per second; on CUDA of a copy, where each byte counts as read and as written."""
        return statistics.median(self.rates)

    def _read(self) -> float:
        start = time.perf_counter()
        self.buffer.sum()
        return self.buffer.nbytes / (time.perf_counter() - start)

    def _copy(self) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.copy.copy_(self.buffer)
        end.record()
        torch.cuda.synchronize()
        seconds: float = start.elapsed_time(end) / 1e3
        return 2 * self.buffer.nbytes / seconds
