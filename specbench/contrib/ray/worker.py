"""One worker of a run, in a process of its own."""

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from specbench.config.validate import ValidatedConfig
from specbench.contrib.cluster.cpu_affinity import pin_cores, placement
from specbench.contrib.ray.data_shard import Groups, Opened, Shard
from specbench.contrib.ray.merge import GroupLimits, Piece
from specbench.errors import ConfigError
from specbench.results.schema import RunResult
from specbench.stats.records import PerRequestSums, RunRecord


@dataclass(frozen=True)
class Place:
    """Where a worker runs."""

    host: str
    device: str
    cores: Sequence[int]
    threads: int
    seconds: float  # from its first call until its models were loaded
    memory: str = ""  # what it needs, in words
    code: Mapping[str, str] = field(default_factory=dict)  # versions, as in `Identity`
    sources: Mapping[str, str] = field(default_factory=dict)  # likewise
    shared: Sequence[str] = ()  # as in `Placement`


Found = TypeVar("Found")


class Worker:
    """Builds the parts of a run, and decodes the groups that it is given."""

    def __init__(self, number: int):
        self.number = number
        self.own = ExitStack()  # its cores, until its process ends
        self.shard: Shard

    def host(self) -> str:
        """The name of its machine."""
        return socket.gethostname()

    def load(
        self, checked: ValidatedConfig, device: str, cores: int, folder: str, beside: int = 1, waits: bool = False
    ) -> tuple[Place, Opened, Any]:
        """Takes so many cores for itself, and builds the parts as a process with this device would, in this folder if
        it is there. `beside` workers, itself among them, need as much memory of the machine; with `waits` it waits for
        cores that others have. Returns the target's tokenizer too. Raises ConfigError."""
        begun = time.perf_counter()
        if os.path.isdir(folder):
            os.chdir(folder)
        if cores:
            self.own.enter_context(pin_cores("workers", cores, told=(lambda text: None) if waits else refuse_waiting))
        import torch

        from specbench.config.build import build
        from specbench.executors.machine import device_name

        if cores:
            torch.set_num_threads(cores)
        checked = replace(checked, root=replace(checked.root, device=device, workers=1))
        told: list[str] = []
        parts = without_gradients(lambda: build(checked, told.append, beside=beside))
        self.shard = without_gradients(lambda: Shard(parts, self.number))
        seconds, found, had = time.perf_counter() - begun, checked.identity(), placement()
        place = Place(
            host=self.host(),
            device=device_name(parts.target.device),
            cores=had.cores if had else [],
            threads=torch.get_num_threads(),
            seconds=seconds,
            memory="; ".join(told),
            code=found.code,
            sources=found.sources,
            shared=had.shared if had else [],
        )
        return place, self.shard.opened(), parts.target.tokenizer

    def open(self, turn: int, answers: Mapping[str, Sequence[str]]) -> Groups:
        """As `Shard.open`."""
        return without_gradients(lambda: self.shard.open(turn, answers))

    def decode(self, number: int, limits: GroupLimits) -> Piece:
        """As `Shard.decode`."""
        return without_gradients(lambda: self.shard.decode(number, limits))

    def fail(self, number: int, error: str) -> Piece:
        """As `Shard.fail`."""
        return without_gradients(lambda: self.shard.fail(number, error))

    def measure(
        self, record: RunRecord, pieces: Sequence[Piece], status: str, facts: Mapping[str, Any]
    ) -> tuple[RunResult, PerRequestSums]:
        """As `Shard.measure`."""
        return without_gradients(lambda: self.shard.measure(record, pieces, status, facts))


def refuse_waiting(why: str) -> None:
    """Raises ConfigError, for a worker that would wait for cores when the run begins."""
    raise ConfigError(f"a worker {why}: use a lower workers, or wait for their end")


def without_gradients(call: Callable[[], Found]) -> Found:
    """What the call returns; torch is imported when cores and threads are known."""
    import torch

    with torch.inference_mode():
        return call()
