"""Measures the machine during a run: short probes of memory and compute, and the use of the cores."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from specbench.decoding import processes
from specbench.run.bandwidth import BandwidthProbe
from specbench.stats.estimates import Machine
from specbench.stats.machine_noise import Probes, Roofs, Use
from specbench.stats.records import Group

SIZE, PRODUCTS = 384, 3  # of the compute probe: matrices, and how many products are timed; a few milliseconds
TICKS = 8  # of a line of /proc/stat: user, nice, system, idle, iowait, irq, softirq, steal; guests are in user


class MachineWatch:
    """Measures memory bandwidth and, on a CPU, compute by the same work at each call, and notes the use of the cores.
    On CUDA the device is not probed again, and its clocks are left as they are."""

    def __init__(
        self,
        device: torch.device,
        clock: Callable[[], float] = time.perf_counter,
        use: Callable[[], Use | None] | None = None,
    ):
        self.bandwidth = BandwidthProbe(device)
        self.clock, self.use = clock, use or core_use
        self.matrix = torch.ones(SIZE, SIZE) if device.type == "cpu" else None
        self.probes = self._empty()

    def __call__(self) -> None:
        """Measures once; of ranks that share a target, rank 0 alone."""
        if not processes.current.is_first_rank:
            return
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

    @property
    def roofs(self) -> Roofs:
        """The memory's bandwidth."""
        return self.bandwidth.roofs

    def judge(self, groups: Sequence[Group]) -> Machine:
        """What is known of the machine at the end of a run; `groups` in the order of decoding."""
        return self.probes.judge(groups)

    def take(self) -> Probes:
        """What was measured since the last time."""
        found, self.bandwidth.reads = self.probes, []
        self.probes = self._empty()
        return found

    def _empty(self) -> Probes:
        return Probes(self.bandwidth.reads, copy=self.bandwidth.copy)


def core_use() -> Use | None:
    """The use of the cores so far; None where there is no /proc."""
    try:
        ticks = os.sysconf("SC_CLK_TCK")
        own = [*os.times()[:4], living(os.getpid(), ticks)]
        if processes.current.size > 1:  # the others are children of the same process
            own = [*os.times()[2:4], living(os.getppid(), ticks)]
        return parse_use(Path("/proc/stat").read_text(), os.sched_getaffinity(0), own, ticks)
    except (OSError, ValueError, AttributeError):
        return None


def living(process: int, ticks: int, folder: Path = Path("/proc")) -> float:
    """Seconds of the processes that this one has started, itself or through others, and that have not ended: those that
    have are in `os.times`."""
    parents, seconds = {}, {}
    for path in folder.glob("[0-9]*/stat"):
        try:
            words = path.read_text(errors="replace").rpartition(")")[2].split()  # after the name, which may hold spaces
            number = int(path.parent.name)
            parents[number], seconds[number] = int(words[1]), sum(map(int, words[11:15])) / ticks
        except (OSError, ValueError, IndexError):  # it has ended meanwhile
            continue

    def is_own(number: int) -> bool:
        while (number := parents.get(number, 0)) != process:
            if number == 0:
                return False
        return True

    return sum(seconds[number] for number in parents if is_own(number))


def parse_use(text: str, cores: set[int], own: Sequence[float], ticks: int) -> Use | None:
    """From the text of /proc/stat, the numbers of the cores that this process may use, the seconds that it and those it
    started used, and ticks per second; None if the text has no such cores."""
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
