"""Measures memory bandwidth, which limits how fast a decoding step can be."""

import statistics
import time
from collections.abc import Callable

import torch

from specbench.executors.machine import free_bytes
from specbench.stats.machine_noise import Roofs

CPU_BYTES = 2**26  # the buffer: more than a core's share of the caches
CUDA_BYTES = 2**30  # shorter reads show less than the full rate
CALLS = 10  # reads, and copies, timed as one on CUDA

Seconds = Callable[[Callable[[], object], torch.device], float]  # of one call, repeated


class BandwidthProbe:
    """Reads a buffer far larger than the caches. On a CPU once per call: the calls are spread over a run, since other
    work on the machine changes the bandwidth that is left. On CUDA once, when it is made, and the buffer is freed."""

    def __init__(self, device: torch.device):
        self.reads: list[float] = []
        self.copy: float | None = None
        self.buffer: torch.Tensor | None = None
        if device.type == "cuda":
            roofs = cuda_roofs(device)
            self.reads, self.copy = [roofs.read], roofs.copy
        else:
            self.buffer = torch.ones(CPU_BYTES // 4)

    def __call__(self) -> None:
        """Measures once on a CPU."""
        if self.buffer is not None:
            start = time.perf_counter()
            self.buffer.sum()
            self.reads.append(self.buffer.nbytes / (time.perf_counter() - start))

    @property
    def roofs(self) -> Roofs:
        """The median of the reads."""
        return Roofs(statistics.median(self.reads), self.copy)


def cuda_roofs(device: torch.device, seconds: Seconds | None = None) -> Roofs:
    """Ten reads of 1 GiB, and ten copies of its first half to its second; of a quarter of the free memory if that is
    less. The memory is given back. `seconds` is `cuda_seconds` unless given."""
    roofs = _roofs(min(CUDA_BYTES, free_bytes(device) // 4), device, seconds or cuda_seconds)
    torch.cuda.empty_cache()
    return roofs


def _roofs(size: int, device: torch.device, seconds: Seconds) -> Roofs:
    """The roofs of a buffer of about `size` bytes."""
    buffer = torch.ones(2, size // 8, device=device)
    read = seconds(buffer.sum, device)
    copy = seconds(lambda: buffer[1].copy_(buffer[0]), device)
    return Roofs(buffer.nbytes / read, buffer.nbytes / copy)


def cuda_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of one of `CALLS` calls, one after the other, after three that are not timed."""
    for _ in range(3):
        call()
    stream = torch.cuda.current_stream(device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record(stream)
    for _ in range(CALLS):
        call()
    end.record(stream)
    torch.cuda.synchronize(device)
    seconds: float = start.elapsed_time(end) / 1e3 / CALLS
    return seconds
