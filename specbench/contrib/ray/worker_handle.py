"""A worker as the process that gives out the groups sees it, and what it has done."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specbench.contrib.ray.merge import Piece
from specbench.contrib.ray.worker import Place
from specbench.results.schema_parts import WorkerNumbers
from specbench.stats.derive import RunFacts, derive, of_one_process
from specbench.stats.records import RunRecord


@dataclass
class WorkerHandle:
    """A worker, and what it does."""

    number: int  # from 1 on; one that takes the place of a dead one has a new number
    worker: Any
    doing: str = ""  # the method that was called
    call: Any = None
    group: int = -1  # that it decodes
    host: str = ""
    place: Place | None = None
    turn: int = -1  # the last one that it has opened
    opening: int = -1  # the one that it opens
    lost: bool = False


def worker_numbers(hands: Sequence[WorkerHandle], pieces: Sequence[Piece], record: RunRecord) -> list[WorkerNumbers]:
    """Of each worker that has loaded; the pieces in the order of their groups, as in the record."""
    own: dict[int, list[int]] = {hand.number: [] for hand in hands}  # its requests
    seconds = dict.fromkeys(own, 0.0)
    count = 0
    for piece in pieces:
        seconds[piece.worker] += piece.seconds
        if piece.group is not None:
            own[piece.worker] += range(count, count + len(piece.group.results))
            count += len(piece.group.results)
    return [_of(hand, hand.place, own[hand.number], seconds[hand.number], record) for hand in hands if hand.place]


def _of(hand: WorkerHandle, place: Place, requests: Sequence[int], seconds: float, record: RunRecord) -> WorkerNumbers:
    own = derive(lambda: [record.sums.only(requests)], of_one_process, RunFacts()) if requests else None
    return WorkerNumbers(
        worker=hand.number,
        host=place.host,
        device=place.device,
        cores=list(place.cores),
        threads=place.threads,
        requests=len(requests),
        tokens=own.counts.tokens if own else 0,
        baseline_tokens=own.counts.baseline_tokens if own else 0,
        tokens_per_second=own.throughput["speculative_tokens_per_second"] if own else None,
        baseline_tokens_per_second=own.throughput["baseline_tokens_per_second"] if own else None,
        speedup=own.speedup.measured if own else None,
        speedup_ci95=own.speedup.ci95 if own else None,
        load_seconds=place.seconds,
        seconds=seconds,
        lost=hand.lost,
    )
