"""The hook for processes that decode the same rows together: they replace `current` (contrib/tensor_parallel)."""

from collections.abc import Sequence
from typing import Any, TypeVar

Value = TypeVar("Value")


class SyncPolicy:
    """What several processes would exchange, for the only process of a run: every method returns its own value."""

    size: int = 1  # processes
    rank: int = 0  # of this one
    local_rank: int = 0  # among those of this machine: the number of its device

    @property
    def is_first_rank(self) -> bool:
        """Whether this is the process that writes and prints."""
        return self.rank == 0

    def broadcast(self, value: Value) -> Value:
        """Rank 0's value, on every rank: for measured values, such as times, which must not lead ranks apart."""
        return value

    def all_reduce_min(self, value: int) -> int:
        """The smallest of all ranks' values."""
        return value

    def local_shard(self, weight: Value) -> Value:
        """What this rank holds of a weight: all of it, unless it is divided."""
        return weight

    def end_round(self, summary: Sequence[Sequence[int]]) -> None:
        """Called with the `summary_of` a round. Raises if ranks differ, and KeyboardInterrupt if a signal waits."""

    def fail_if_distributed(self, error: BaseException) -> None:
        """Raises an error that is one request's if there are other ranks, which may not have met it."""

    def collectives(self) -> Sequence[Any]:
        """The collectives since the last call of this method, for `seconds_of`."""
        return ()

    def seconds_of(self, collectives: Sequence[Any]) -> float:
        """Seconds in these collectives, waiting for the slowest rank included. On CUDA it waits for the device."""
        return 0.0

    def communication(self, plain: Sequence[Any], ours: Sequence[Any], step: float, calls: int, steps: int) -> Any:
        """The field `cost.communication` of results.json, from the `Laps` of both decoders: `step` is the seconds of a
        single-token step, `calls` and `steps` count target calls and drafter steps of speculative decoding."""
        return None

    def agrees_with_whole(self, divided: Any, load: Any, key: str) -> bool:
        """Compares the logits of a divided model with those of the whole one, which `load` loads; False if they were
        not compared. Raises ConfigError, naming `key`, if they differ by more than rounding."""
        return False

    def parent_argv(self) -> list[str]:
        """The words of the command that has started the ranks; empty if none has."""
        return []


current = SyncPolicy()
