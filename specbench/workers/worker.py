"""One worker of a run, in a process of its own."""

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from specbench.config.checks import Checked
from specbench.decoded import Record, RequestSums
from specbench.results import RunResult
from specbench.run.merge import Limits, Piece
from specbench.run.shard import Groups, Opened, Shard
from specbench.workers.cores import claim


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


Found = TypeVar("Found")


class Worker:
    """Builds the parts of a run, and decodes the groups that it is given."""

    def __init__(self, number: int):
        self.number = number
        self.shard: Shard

    def host(self) -> str:
        """The name of its machine."""
        return socket.gethostname()

    def load(self, checked: Checked, cores: int, folder: str) -> tuple[Place, Opened, Any]:
        """Takes so many cores for itself, and builds the parts as a process in this folder would, if it is there.
        Returns the target's tokenizer too. Raises ConfigError."""
        begun = time.perf_counter()
        if os.path.isdir(folder):
            os.chdir(folder)
        own = claim(cores) if cores else []
        import torch

        from specbench.config.build import build
        from specbench.devices import device_name

        if own:
            torch.set_num_threads(len(own))
        told: list[str] = []
        parts = without_gradients(lambda: build(checked, told.append))
        self.shard = without_gradients(lambda: Shard(parts, self.number))
        seconds, device = time.perf_counter() - begun, device_name(parts.target.device)
        code = checked.identity().code
        place = Place(self.host(), device, own, torch.get_num_threads(), seconds, "; ".join(told), code)
        return place, self.shard.opened(), parts.target.tokenizer

    def open(self, turn: int, answers: Mapping[str, Sequence[str]]) -> Groups:
        """As `Shard.open`."""
        return without_gradients(lambda: self.shard.open(turn, answers))

    def decode(self, number: int, limits: Limits) -> Piece:
        """As `Shard.decode`."""
        return without_gradients(lambda: self.shard.decode(number, limits))

    def fail(self, number: int, error: str) -> Piece:
        """As `Shard.fail`."""
        return without_gradients(lambda: self.shard.fail(number, error))

    def measure(
        self, record: Record, pieces: Sequence[Piece], status: str, facts: Mapping[str, Any]
    ) -> tuple[RunResult, RequestSums]:
        """As `Shard.measure`."""
        return without_gradients(lambda: self.shard.measure(record, pieces, status, facts))


def without_gradients(call: Callable[[], Found]) -> Found:
    """What the call returns; torch is imported when cores and threads are known."""
    import torch

    with torch.inference_mode():
        return call()
