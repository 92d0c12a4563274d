"""Measures the machine during a run: probes of memory bandwidth, which limits how fast a decoding step can be, and of
compute, and the use of the cores."""

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from specbench.executors.machine import free_bytes
from specbench.stats.machine_noise import Probes, Roofs, Use

SIZE, PRODUCTS = 384, 3  # of the compute probe: matrices, and how many products are timed; a few milliseconds
TICKS = 8  # of a line of /proc/stat: user, nice, system, idle, iowait, irq, softirq, steal; guests are in user
CPU_BYTES = 2**26  # the buffer: more than a core's share of the caches
CUDA_BYTES = 2**30  # shorter reads show less than the full rate
CALLS = 10  # reads, and copies, timed as one on CUDA

SecondsOfCall = Callable[[Callable[[], object], torch.device], float]  # of one call, repeated


class BandwidthProbe:
    """Reads a buffer far larger than the caches: on a CPU at each call, since other work on the machine changes the
    bandwidth that is left; on CUDA once, when it is made."""

    def __init__(self, device: torch.device):
        self.reads: list[float] = []
        self.copy: float | None = None
        self.buffer = None if device.type == "cuda" else torch.ones(CPU_BYTES // 4)
        if self.buffer is None:
            read, self.copy = cuda_roofs(device)
            self.reads = [read]

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


def cuda_roofs(device: torch.device, seconds: SecondsOfCall | None = None) -> Roofs:
    """Reads of 1 GiB, and copies of its first half to its second; of a quarter of the free memory if that is less. The
    memory is given back. `seconds` is `cuda_seconds` unless given."""
    seconds = seconds or cuda_seconds
    buffer = torch.ones(2, min(CUDA_BYTES, free_bytes(device) // 4) // 8, device=device)
    read = seconds(buffer.sum, device)
    copy = seconds(partial(buffer[1].copy_, buffer[0]), device)
    roofs = Roofs(buffer.nbytes / read, buffer.nbytes / copy)
    del buffer
    torch.cuda.empty_cache()
    return roofs


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


class MachineWatch:
    """Measures bandwidth and, on a CPU, compute by the same work at each call, and notes the use of the cores."""

    def __init__(
        self,
        device: torch.device,
        clock: Callable[[], float] = time.perf_counter,
        use: Callable[[], Use | None] | None = None,
    ):
        self.bandwidth = BandwidthProbe(device)
        self.clock, self.use = clock, use or core_use
        self.matrix = torch.ones(SIZE, SIZE) if device.type == "cpu" else None
        self.probes = Probes(self.bandwidth.reads, copy=self.bandwidth.copy)

    def __call__(self) -> None:
        """Measures once; of ranks that share a target, rank 0 alone."""
        if (found := self.use()) is not None:
            self.probes.uses.append(found)
        self.bandwidth()
        if self.matrix is not None:
            self.matrix @ self.matrix  # what decoding has left in the caches is not timed
            start = self.clock()
            for _ in range(PRODUCTS):
                self.matrix @ self.matrix
            self.probes.seconds.append(self.clock() - start)

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Inside, other processes work for this run: what they use of the cores is left out."""
        before = self.use()
        try:
            yield
        finally:
            after = self.use()
            if before is not None and after is not None:
                self.probes.left_out.append((before, after))

    def take(self) -> Probes:
        """What was measured since the last time."""
        found, self.bandwidth.reads = self.probes, []
        self.probes = Probes(self.bandwidth.reads, copy=self.bandwidth.copy)
        return found


def core_use() -> Use | None:
    """The use of the cores so far; None where there is no /proc."""
    try:
        ticks = os.sysconf("SC_CLK_TCK")
        own = [*os.times()[:4], living(os.getpid(), ticks)]
        return parse_use(Path("/proc/stat").read_text(), os.sched_getaffinity(0), own, ticks)
    except (OSError, ValueError, AttributeError):
        return None


def living(process: int, ticks: int, folder: Path = Path("/proc")) -> float:
    """Seconds of the processes that this one has started, itself or through others, and that have not ended: those that
    have are in `os.times`."""
    children: dict[int, list[int]] = {}
    seconds: dict[int, float] = {}
    for path in folder.glob("[0-9]*/stat"):
        try:
            words = path.read_text(errors="replace").rpartition(")")[2].split()  # after the name, which may hold spaces
            number, parent, used = int(path.parent.name), int(words[1]), sum(map(int, words[11:15])) / ticks
        except (OSError, ValueError, IndexError):  # it has ended meanwhile
            continue
        children.setdefault(parent, []).append(number)
        seconds[number] = used
    own, waiting = 0.0, list(children.get(process, ()))
    while waiting:
        number = waiting.pop()
        own += seconds[number]
        waiting += children.get(number, ())
    return own


def parse_use(text: str, cores: set[int], own: Sequence[float], ticks: int) -> Use | None:
    """From the text of /proc/stat, the cores that this process may use, the seconds that it and those it started used,
    and ticks per second; None if the text has no such cores."""
    names = {f"cpu{core}" for core in cores}
    lines = [line.split() for line in text.splitlines() if line.startswith("cpu")]
    rows = [[int(word) for word in words[1 : TICKS + 1]] for words in lines if words[0] in names]
    if not rows or len(rows[0]) < TICKS:
        return None
    user, nice, system, idle, waiting, irq, soft_irq, steal = (
        sum(column) / ticks for column in zip(*rows, strict=True)
    )
    busy = user + nice + system + irq + soft_irq
    return Use(busy + idle + waiting + steal, busy, steal, sum(own))
