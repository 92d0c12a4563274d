"""The processes that share one target (tensor parallelism), each a rank of torch.distributed's. All ranks run the
same program with the same noise; the tokens that they draw are compared once a round."""

import functools
import json
import os
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch

from specbench.decoding import processes
from specbench.decoding.processes import SyncPolicy
from specbench.decoding.timer import COLLECTIVE, Lap, Laps, decoding_seconds
from specbench.errors import IncompleteError
from specbench.run import signals
from specbench.stats.estimates import Communication

TIMEOUT = timedelta(minutes=10)  # of one collective: a rank that waits longer gives up
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
PARENT_ARGV = "SPECBENCH_ARGV"  # variable of the environment
SharedValue = TypeVar("SharedValue")


class RankError(IncompleteError):
    """The ranks of a run cannot go on together: one has ended, does not answer, or has drawn other tokens."""


def started_processes() -> int:
    """The number of processes that torchrun, or whatever else set its variables, has started with this one; 1 if none
    did."""
    there = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    return int(os.environ["WORLD_SIZE"]) if there else 1


def join(device: str, rank: int | None = None, size: int | None = None, store: str | None = None) -> None:
    """Joins the group that torchrun has started, on a "cpu" or "cuda" device; or, given all three, a group that meets
    in the file `store`. Raises RankError if the others do not come."""
    where: dict[str, Any] = {"init_method": "env://"}
    if store is not None:
        where = {"init_method": f"file://{store}", "rank": rank, "world_size": size}
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if device == "cuda":
        device = f"cuda:{local_rank}"
        torch.cuda.set_device(device)
        where["device_id"] = torch.device(device)
    try:
        torch.distributed.init_process_group(backend_of(device), timeout=TIMEOUT, **where)
    except (RuntimeError, ValueError) as error:
        raise RankError(f"the processes of target.tensor_parallel do not meet: {error}") from error
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    processes.current = ProcessGroup(device, rank, size, local_rank)
    _watch_collectives()


def leave() -> None:
    """Leaves the group, if there is one."""
    if isinstance(processes.current, ProcessGroup):
        processes.current = SyncPolicy()
        torch.distributed.destroy_process_group()


def backend_of(device: str) -> str:
    """What carries the collectives: gloo between processes on CPUs, nccl between GPUs."""
    return BACKENDS[device.partition(":")[0]]


class ProcessGroup(SyncPolicy):
    """The ranks that this process has joined."""

    def __init__(self, device: str, rank: int, size: int, local_rank: int = 0):
        """`device` is this rank's, "cpu" or "cuda:N"."""
        self.device, self.rank, self.size, self.local_rank = device, rank, size, local_rank
        self._spans: list[Any] = []  # of collectives, since they were last taken
        self._inside = False  # whether a collective is going on

    def broadcast(self, value: SharedValue) -> SharedValue:
        held = [value]
        with self.collective():
            torch.distributed.broadcast_object_list(held, src=0, device=torch.device(self.device))
        return held[0]

    def all_reduce_min(self, value: int) -> int:
        found = torch.tensor([value], device=self.device)
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MIN)
        return int(found.item())

    def local_shard(self, weight: SharedValue) -> SharedValue:
        from torch.distributed.tensor import DTensor

        shard: Any = weight.to_local() if isinstance(weight, DTensor) else weight
        return shard  # type: ignore[no-any-return]

    def end_round(self, summary: Sequence[Sequence[int]]) -> None:
        if self.compare(summary, signals.is_waiting()):
            signals.interrupt()

    def compare(self, numbers: Sequence[Sequence[int]], stop: bool = False) -> bool:
        """Compares these numbers with those of all ranks. Returns whether any of them wants to `stop`. Raises RankError
        if the numbers differ."""
        digest = zlib.crc32(repr(numbers).encode())
        most = torch.tensor([digest, -digest, int(stop)], device=self.device)
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
        high, low, stops = most.tolist()
        if high != -low:
            raise RankError(
                f"rank {self.rank} of {self.size} has drawn other tokens than another rank in the same round: the "
                "ranks need the same settings, checkpoints and kind of device"
            )
        return bool(stops)

    def fail_if_distributed(self, error: BaseException) -> None:
        """Raises RankError, unless the error is one that all ranks raise (MemoryError, which is ours)."""
        if not isinstance(error, MemoryError):
            raise RankError(f"rank {self.rank} of {self.size}: {type(error).__name__}: {error}") from error

    def communication(
        self, plain: Sequence[Laps], ours: Sequence[Laps], step: float, calls: int, steps: int
    ) -> Communication:
        in_all = [sum(laps[lap] for laps in decoder for lap in COLLECTIVE) for decoder in (ours, plain)]
        seconds = [sum(decoding_seconds(laps) for laps in decoder) for decoder in (ours, plain)]
        draft, verify, other = (sum(laps[lap] for laps in ours) for lap in COLLECTIVE)
        return Communication(
            processes=self.size,
            backend=backend_of(self.device),
            share=in_all[0] / seconds[0],
            plain_share=in_all[1] / seconds[1],
            step=sum(laps[Lap.VERIFY_COLLECTIVES] for laps in plain) / sum(laps[Lap.VERIFY] for laps in plain),
            c=draft / steps / step if steps else None,
            v=verify / calls / step,
            o=other / calls / step,
        )

    def agrees_with_whole(self, divided: Any, load: Any, key: str) -> bool:
        from specbench.contrib.tensor_parallel.model_check import agrees_with_whole

        return agrees_with_whole(divided, load, key)

    def parent_argv(self) -> list[str]:
        words: list[str] = json.loads(os.environ.get(PARENT_ARGV, "[]"))
        return words

    def collectives(self) -> Sequence[Any]:
        taken, self._spans = self._spans, []
        return taken

    def seconds_of(self, collectives: Sequence[Any]) -> float:
        if self.device != "cpu":
            return float(sum(begin.elapsed_time(end) for begin, end in collectives)) / 1e3
        return float(sum(end - begin for begin, end in collectives))

    @contextmanager
    def collective(self) -> Iterator[None]:
        """Inside this context ranks exchange tensors: it is timed, and its errors become RankError."""
        if self._inside:
            yield
            return
        self._inside, begun = True, self._now()
        try:
            yield
        except RuntimeError as error:
            line = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise RankError(f"another rank has ended, or does not answer (seen by rank {self.rank}: {line})") from error
        finally:
            self._inside = False
            self._spans.append((begun, self._now()))

    def _now(self) -> Any:
        if self.device == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event


def _watch_collectives() -> None:
    """From now on every way in which the layers of transformers and this module exchange tensors is a `collective`:
    `all_reduce`, and the redistribution of a DTensor."""
    from torch.distributed.tensor import DTensor

    for owner, name in ((torch.distributed, "all_reduce"), (DTensor, "redistribute")):
        function = getattr(owner, name)
        if not getattr(function, "is_watched", False):
            setattr(owner, name, _watched(function))


def _watched(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        if not isinstance(processes.current, ProcessGroup):
            return function(*arguments, **options)
        with processes.current.collective():
            return function(*arguments, **options)

    call.is_watched = True  # type: ignore[attr-defined]
    return call
