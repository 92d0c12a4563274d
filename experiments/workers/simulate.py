"""How long a run would take on many workers: the code that gives out the groups, in virtual time.

`Team` is the real one. What a worker's calls take is drawn from measured seconds, and the clock jumps from the end of
one call to the end of the next.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from specbench.contrib.ray.coordinator import Team
from specbench.contrib.ray.data_shard import Groups, Opened
from specbench.contrib.ray.merge import Piece
from specbench.contrib.ray.pool import DiedError
from specbench.contrib.ray.worker import Place
from specbench.stats.costs import CostTable
from specbench.stats.machine_noise import Probes

HOST = 8  # workers of one machine


@dataclass(frozen=True)
class Seconds:
    """What was measured."""

    groups: Sequence[float]  # of each group, with everything
    process: float  # a worker's process, until it can be called
    load: float  # its models, from a disk of its own
    warm_up: float
    take: float  # the process of the command takes a group: it writes and merges
    weights: float  # bytes that each worker reads


@dataclass(frozen=True)
class World:
    """What was not measured here."""

    spread: float = 0.0  # standard deviation of the logarithm of workers' speeds
    stragglers: float = 0.0  # share of the workers that are three times as slow
    shared_bytes_per_second: float = float("inf")  # of the file system with the weights, all workers together
    deaths_an_hour: float = 0.0  # of each worker


@dataclass(frozen=True, eq=False)
class Call:
    worker: int
    method: str
    argument: Any  # the first one
    end: float
    dies: bool  # whether the worker does not end it


class VirtualPool:
    """As `specbench.contrib.ray.pool.Pool`."""

    cores = 1

    def __init__(self, seconds: Seconds, world: World, groups: int, seed: int):
        self.seconds, self.world, self.groups = seconds, world, groups
        self.rng = np.random.default_rng(seed)
        self.own = self.rng.choice(np.asarray(seconds.groups), groups)  # what each group takes on a usual worker
        self.now, self.disk, self.begun, self.busy = 0.0, 0.0, 0.0, 0.0
        self.slow: dict[int, float] = {}

    def start(self, number: int) -> int:
        slow = np.exp(self.rng.normal(0, self.world.spread)) if self.world.spread else 1.0
        self.slow[number] = float(slow) * (3.0 if self.rng.random() < self.world.stragglers else 1.0)
        return number

    def call(self, worker: int, method: str, *arguments: Any) -> Call:
        end = self.now + self._taken(worker, method, arguments)
        death = self.now + self.rng.exponential(3600 / self.world.deaths_an_hour) if self.world.deaths_an_hour else end
        return Call(worker, method, next(iter(arguments), None), min(end, death), death < end)

    def wait(self, calls: Sequence[Call], seconds: float) -> list[Call]:
        first = min(calls, key=lambda call: call.end)
        self.now = max(self.now, first.end)
        return [first]

    def end(self, worker: int) -> None:
        pass

    def result(self, call: Call) -> Any:
        worker, method = call.worker, call.method
        if call.dies:
            raise DiedError("by lot")
        if method == "host":
            return f"host {worker // HOST}"
        if method == "load":
            return Place(f"host {worker // HOST}", "", [], 1, 0.0), Opened(self.groups, 1, {}, False), None
        if method == "open":
            self.begun = self.begun or self.now
            return Groups(range(self.groups), 0, 0)
        self.now += self.seconds.take  # while it takes one, the others wait
        self.busy += self.seconds.take
        return Piece(call.argument, worker, None, None, {}, CostTable(), Probes(), ended=self.now)

    def _taken(self, worker: int, method: str, arguments: tuple[Any, ...]) -> float:
        s, slow = self.seconds, self.slow[worker]
        if method == "load" and (worker % HOST == 0 or worker == 1):  # a machine's others find them in its memory
            self.disk = max(self.disk, self.now) + s.weights / self.world.shared_bytes_per_second
            return max(s.load * slow, self.disk - self.now)
        if method == "decode":
            return float(self.own[arguments[0]]) * slow
        return {"host": s.process, "load": s.load * slow, "open": s.warm_up * slow}[method]


@dataclass(frozen=True)
class Taken:
    """Seconds of a simulated run, until its last group is decoded."""

    start: float  # until the first group could begin
    decoding: float
    taking: float  # that the process of the command was busy with groups
    died: int


def simulate(seconds: Seconds, world: World, workers: int, groups: int, seed: int) -> Taken:
    """A run of one turn, on so many workers."""
    pool = VirtualPool(seconds, world, groups, seed)
    checked: Any = SimpleNamespace(
        root=SimpleNamespace(verdict_tokens=0, device="cpu"), identity=lambda: SimpleNamespace(code={}, sources={})
    )
    team = Team(checked, pool, workers)
    team.load()
    team.decode(lambda piece: None)
    decoded = pool.now
    return Taken(
        start=pool.begun,
        decoding=decoded - pool.begun,
        taking=pool.busy,
        died=sum(hand.lost for hand in team.hands),
    )
