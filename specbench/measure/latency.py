"""How long requests waited, where they arrive over time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from specbench.results import Latency

if TYPE_CHECKING:
    from specbench.batch import Decoded
    from specbench.decoding import queue


def with_latency(decoded: Decoded) -> Iterator[tuple[queue.Latency, int]]:
    """Times and number of tokens of each request that was watched."""
    yield from zip(decoded.latencies, map(len, decoded.tokens), strict=False)


def latency(requests: Sequence[tuple[queue.Latency, int]]) -> Latency:
    """Percentiles over requests."""
    later = [(seen.finished - seen.first_token) / (tokens - 1) for seen, tokens in requests if tokens > 1]
    return Latency(
        queue=percentiles([seen.admitted - seen.arrived for seen, _ in requests]),
        first_token=percentiles([seen.first_token - seen.arrived for seen, _ in requests]),
        per_token=percentiles(later),
    )


def percentiles(values: Sequence[float]) -> dict[str, float]:
    return {f"p{p}": float(np.percentile(values, p)) if len(values) else float("nan") for p in (50, 90, 99)}
