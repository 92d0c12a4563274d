"""How a check measures time, kernels and synchronisations on CUDA. Tests pass a timer of their own."""

import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any, Protocol

import torch

Call = Callable[[], Any]


class Timer(Protocol):
    """What phases ask of a timer. All times are seconds."""

    def device(self, call: Call, calls: int = 20) -> float:
        """Of one call, when `calls` of them run one after the other: what the device needs, if it is the slower one."""

    def wall(self, call: Call, calls: int = 1) -> float:
        """Of one call by the host's clock, from an idle device to an idle device; the median of `calls`."""

    def host(self, call: Call, calls: int = 20) -> float:
        """Until the call returns, the device not waited for: what it costs Python. The median of `calls`."""

    def kernels(self, call: Call) -> int:
        """The number of kernels that one call runs."""

    def synchronisations(self, call: Call) -> list[str]:
        """For each time that one call makes the host wait for the device, what PyTorch says of it."""

    def captured(self, call: Call) -> Call:
        """The call as a CUDA graph: a function that replays it."""


class CudaTimer:
    """The timer of a CUDA device."""

    def __init__(self, device: torch.device):
        self._where = device

    def device(self, call: Call, calls: int = 20) -> float:
        call()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._wait()
        start.record()
        for _ in range(calls):
            call()
        end.record()
        self._wait()
        seconds: float = start.elapsed_time(end) / 1e3 / calls
        return seconds

    def wall(self, call: Call, calls: int = 1) -> float:
        return statistics.median(self._once(call, wait=True) for _ in range(calls))

    def host(self, call: Call, calls: int = 20) -> float:
        call()
        return statistics.median(self._once(call, wait=False) for _ in range(calls))

    def kernels(self, call: Call) -> int:
        call()
        self._wait()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call()
            self._wait()
        names = [event.name for event in profile.events() if event.device_type.name == "CUDA"]
        return sum(not name.startswith(("Memcpy", "Memset")) for name in names)

    def synchronisations(self, call: Call) -> list[str]:
        self._wait()
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                call()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return [f"{w.filename}:{w.lineno}" for w in found if "synchronizing CUDA operation" in str(w.message)]

    def captured(self, call: Call) -> Call:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        replay: Call = graph.replay
        return replay

    def _once(self, call: Call, wait: bool) -> float:
        self._wait()
        start = time.perf_counter()
        call()
        if wait:
            self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        torch.cuda.synchronize(self._where)
