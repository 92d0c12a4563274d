"""What each worker of a run has done, for the field `workers` of results.json."""

from collections.abc import Sequence

from specbench.contrib.ray.merge import Piece
from specbench.contrib.ray.worker_handle import WorkerHandle
from specbench.results.schema import WorkerNumbers
from specbench.stats.derive import RunFacts, derive, of_one_process
from specbench.stats.records import RunRecord


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
    return [_of(hand, own[hand.number], seconds[hand.number], record) for hand in hands if hand.place is not None]


def _of(hand: WorkerHandle, requests: Sequence[int], seconds: float, record: RunRecord) -> WorkerNumbers:
    assert hand.place is not None
    found = WorkerNumbers(
        worker=hand.number,
        host=hand.place.host,
        device=hand.place.device,
        cores=list(hand.place.cores),
        threads=hand.place.threads,
        requests=len(requests),
        tokens=0,
        baseline_tokens=0,
        tokens_per_second=None,
        baseline_tokens_per_second=None,
        speedup=None,
        speedup_ci95=None,
        load_seconds=hand.place.seconds,
        seconds=seconds,
        lost=hand.lost,
    )
    if requests:
        own = derive(lambda: [record.sums.only(requests)], of_one_process, RunFacts())
        found.tokens, found.baseline_tokens = own.counts.tokens, own.counts.baseline_tokens
        found.tokens_per_second = own.throughput["speculative_tokens_per_second"]
        found.baseline_tokens_per_second = own.throughput["baseline_tokens_per_second"]
        found.speedup, found.speedup_ci95 = own.speedup.measured, own.speedup.ci95
    return found
