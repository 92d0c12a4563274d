"""The processes that share one target (tensor parallelism), each a rank of torch.distributed's.

Every rank runs the same program on the same requests with the same noise; only the target's layers are divided, and
collectives put their results together. So all ranks draw the same tokens, which is compared once a round. The state is
the process's, as the group of processes is.
"""

import functools
import json
import os
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from specbench.errors import IncompleteError

if TYPE_CHECKING:  # the command line imports this module before it needs torch
    from torch import Tensor

TIMEOUT = timedelta(minutes=10)  # of one collective: a rank that waits longer gives up
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
ASKED = "SPECBENCH_ARGV"  # variable of the environment
Value = TypeVar("Value")


class RankError(IncompleteError):
    """The ranks of a run cannot go on together: one has ended, does not answer, or has drawn other tokens."""


class _State:
    """What is known of the ranks in this process."""

    def __init__(self) -> None:
        self.size = 1  # of the group that this process has joined
        self.rank = 0
        self.device = "cpu"
        self.spans: list[Any] = []  # of collectives, since they were last taken
        self.inside = False  # whether a collective is going on


_state = _State()


def size() -> int:
    """The number of ranks; 1 without a group."""
    return _state.size


def first() -> bool:
    """Whether this is rank 0, which alone writes and prints, or the only process."""
    return _state.rank == 0


def number() -> int:
    """This process's rank."""
    return _state.rank


def started() -> int:
    """The number of processes that torchrun, or whatever else set its variables, has started with this one; 1 if none
    did."""
    there = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    return int(os.environ["WORLD_SIZE"]) if there else 1


def asked() -> list[str]:
    """The words of the command that has started the ranks, if this process is one of them and a command of ours did."""
    words: list[str] = json.loads(os.environ.get(ASKED, "[]")) if started() > 1 else []
    return words


def local() -> int:
    """The number of this process among those of this machine, which is that of its device."""
    return int(os.environ.get("LOCAL_RANK", 0))


def backend() -> str:
    """What carries the collectives: gloo between processes on CPUs, nccl between GPUs."""
    return BACKENDS[_state.device.partition(":")[0]]


def join(device: str, rank: int | None = None, processes: int | None = None, store: str | None = None) -> None:
    """Joins the group that torchrun has started, on a "cpu" or "cuda" device; or, given all three, a group that meets
    in the file `store`. Raises RankError if the others do not come."""
    import torch

    _state.device = f"cuda:{local()}" if device == "cuda" else device
    if device == "cuda":
        torch.cuda.set_device(_state.device)
    where: dict[str, Any] = {"init_method": "env://"}
    if store is not None:
        where = {"init_method": f"file://{store}", "rank": rank, "world_size": processes}
    bound: dict[str, Any] = {"device_id": torch.device(_state.device)} if device == "cuda" else {}
    try:
        torch.distributed.init_process_group(BACKENDS[device], timeout=TIMEOUT, **where, **bound)
    except (RuntimeError, ValueError) as error:
        raise RankError(f"the processes of target.tensor_parallel do not meet: {error}") from error
    _state.size, _state.rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    _watch_collectives()


def leave() -> None:
    """Leaves the group, if there is one."""
    if _state.size > 1:
        import torch

        _state.size, _state.rank = 1, 0
        torch.distributed.destroy_process_group()


def compare(numbers: Sequence[Sequence[int]], stop: bool = False) -> bool:
    """Compares these numbers with those of all ranks. Returns whether any of them wants to `stop`. Raises RankError if
    the numbers differ."""
    import torch

    digest = zlib.crc32(repr(numbers).encode())
    most = torch.tensor([digest, -digest, int(stop)], device=_state.device)
    torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
    high, low, stops = most.tolist()
    if high != -low:
        raise RankError(
            f"rank {_state.rank} of {_state.size} has drawn other tokens than another rank in the same round: the "
            "ranks need the same settings, checkpoints and kind of device"
        )
    return bool(stops)


def of_first(value: Value) -> Value:
    """Rank 0's value, on every rank: for what is measured, such as times, which must not lead ranks apart."""
    if _state.size == 1:
        return value
    import torch

    held = [value]
    with _collective():
        torch.distributed.broadcast_object_list(held, src=0, device=torch.device(_state.device))
    return held[0]


def least(value: int) -> int:
    """The smallest of all ranks' values."""
    if _state.size == 1:
        return value
    import torch

    found = torch.tensor([value], device=_state.device)
    torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MIN)
    return int(found.item())


def alone(error: BaseException) -> None:
    """Called where an error is one request's, and the run goes on. Ranks cannot know whether the others have met it:
    raises RankError if there are any, unless the error is one that all raise (MemoryError, which is ours)."""
    if _state.size > 1 and not isinstance(error, MemoryError):
        raise RankError(f"rank {_state.rank} of {_state.size}: {type(error).__name__}: {error}") from error


def part(weight: "Tensor") -> "Tensor":
    """What this rank holds of a weight: all of it, unless it is divided."""
    if _state.size == 1:
        return weight
    from torch.distributed.tensor import DTensor

    return weight.to_local() if isinstance(weight, DTensor) else weight


# -- Times of collectives -------------------------------------------------------------------------


def spans() -> list[Any]:
    """What `seconds` adds up, of the collectives since the last call of this function."""
    taken, _state.spans = _state.spans, []
    return taken


def seconds(spans: Sequence[Any]) -> float:
    """Seconds in collectives, waiting for the slowest rank included. On CUDA it waits for the device."""
    if _state.device != "cpu":
        return float(sum(begin.elapsed_time(end) for begin, end in spans)) / 1e3
    return float(sum(end - begin for begin, end in spans))


def _now() -> Any:
    if _state.device == "cpu":
        return time.perf_counter()
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(_state.device))
    return event


@contextmanager
def _collective() -> Iterator[None]:
    """Inside this context ranks exchange tensors: it is timed, and its errors become RankError."""
    if _state.inside or _state.size == 1:
        yield
        return
    _state.inside, begun = True, _now()
    try:
        yield
    except RuntimeError as error:
        line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RankError(f"another rank has ended, or does not answer (seen by rank {_state.rank}: {line})") from error
    finally:
        _state.inside = False
        _state.spans.append((begun, _now()))


def _watch_collectives() -> None:
    """From now on every way in which the layers of transformers and this module exchange tensors is a `_collective`:
    `all_reduce`, and the redistribution of a DTensor."""
    import torch
    from torch.distributed.tensor import DTensor

    for owner, name in ((torch.distributed, "all_reduce"), (DTensor, "redistribute")):
        function = getattr(owner, name)
        if not getattr(function, "is_watched", False):
            setattr(owner, name, _watched(function))


def _watched(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        with _collective():
            return function(*arguments, **options)

    call.is_watched = True  # type: ignore[attr-defined]
    return call
