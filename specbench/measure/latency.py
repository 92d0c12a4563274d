"""Waiting times of requests that arrive over time."""

from collections.abc import Sequence

import numpy as np

from specbench.decoded import DecodedRequest
from specbench.results import Latency


def latency(requests: Sequence[DecodedRequest]) -> Latency | None:
    """Percentiles of waiting times, in seconds, over the requests that arrived over time; None if there are none."""
    seen = [(request.times, len(request.tokens)) for request in requests if request.times is not None]
    if not seen:
        return None
    return Latency(
        queue=percentiles([times.admitted - times.arrived for times, _ in seen]),
        first_token=percentiles([times.first_token - times.arrived for times, _ in seen]),
        per_token=percentiles(
            [(times.finished - times.first_token) / (tokens - 1) for times, tokens in seen if tokens > 1]
        ),
    )


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """{"p50": .., "p90": .., "p99": ..} of the values, in their unit."""
    return {f"p{p}": float(np.percentile(values, p)) if len(values) else float("nan") for p in (50, 90, 99)}
