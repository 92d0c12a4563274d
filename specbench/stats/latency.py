"""Waiting times between tokens, and of requests that arrive over time also in the queue, and goodput.

Of each segment of such requests the first ones, one for every row, find nothing to wait for and are not counted, unless
there are no others. Errors are those of a bootstrap over segments.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from specbench.stats.bootstrap import FEWEST, cluster_weights, intervals_of
from specbench.stats.estimates import Factor, Floats, Goodput, Interval, Latency, Percentiles, RateLatency, Served
from specbench.stats.records import DecodedRequest, Group, call_seconds

PERCENTILES = (50, 90, 99)
ALL_PERCENTILES = (50, 90, 95, 99)  # percentiles, with those that have no interval
BEYOND = 5  # a percentile with fewer requests beyond it says nothing
SEGMENT_SAMPLES = 400
DELAYS = ("queue", "first_token", "per_token")
FIRST_TOKEN, PER_TOKEN, TOKENS, ARRIVED, FINISHED, LATER = 1, 2, 3, 4, 5, 6  # columns of a table, behind "queue"
DECODERS = ("speculative", "baseline")
DELAY_NAMES = [(delay, f"p{percentile}") for delay in DELAYS for percentile in PERCENTILES]


@dataclass(frozen=True)
class WaitLimits:
    """What a request may wait, in seconds, to count for goodput; 0 is no limit."""

    first_token: float = 0.0
    per_token: float = 0.0


Segments = Mapping[str, Sequence[Floats]]  # by decoder, for each segment [requests, 7]


def enough(percentile: int, requests: int) -> bool:
    """Whether at least `BEYOND` of so many requests are beyond a percentile."""
    return requests * (100 - percentile) >= 100 * BEYOND


def latency(groups: Sequence[Group], rows: int) -> dict[str, Latency]:
    """Waiting times of all requests by decoder."""
    return {decoder: _latency_of([_counted(group, way, rows) for group in groups])
            for way, decoder in enumerate(DECODERS)}  # fmt: skip


def _latency_of(groups: Sequence[Sequence[DecodedRequest]]) -> Latency:
    """The waiting times of some groups of requests. A request alone has its first token after its prompt was read and
    its first round; of several that are there at once nothing says how long each waited."""
    requests = [request for group in groups for request in group]
    seconds = [call_seconds(request.rounds) for request in requests]
    if all(request.times is not None for request in requests):
        delays = [*np.array([_row(request)[: len(DELAYS)] for request in requests]).T]
    else:
        alone = all(len(group) == 1 for group in groups)
        later = [own[1:].sum() / (len(request.tokens) - first_tokens(request))
                 for request, own in zip(requests, seconds, strict=True) if len(own) > 1]  # fmt: skip
        delays = [np.array(own) for own in ([], [own[0] for own in seconds] if alone else [], later)]
    per_token = [time_per_output_token(*each) for each in zip(requests, seconds, strict=True)]
    return replace(
        Latency(*(percentiles(own[np.isfinite(own)]) for own in delays)),
        time_per_output_token=latency_summary([own for own in per_token if own is not None]),
        inter_token=latency_summary(np.concatenate([own[1:] for own in seconds])),
    )


def first_tokens(request: DecodedRequest) -> int:
    """The tokens of the first round, which come together."""
    return next(iter(request.rounds)).tokens


def time_per_output_token(request: DecodedRequest, seconds: Floats) -> float | None:
    """(last token - first token) / (tokens - 1), as serving benchmarks have it; None for a text of one token. `seconds`
    [rounds] are those of its calls."""
    later = len(request.tokens) - 1
    if not later:
        return None
    times = request.times
    return float(seconds[1:].sum() if times is None else times.finished - times.first_token) / later


def latency_summary(seconds: Sequence[float] | Floats) -> Percentiles:
    """The mean and the percentiles; None without values."""
    return {"mean": float(np.mean(seconds)) if len(seconds) else None, **percentiles(seconds)}


def percentiles(seconds: Sequence[float] | Floats) -> Percentiles:
    """The percentiles ALL_PERCENTILES of numbers; None without any."""
    return {f"p{p}": float(np.percentile(seconds, p)) if len(seconds) else None for p in ALL_PERCENTILES}


def by_rate(groups: Sequence[Group], rows: int, limits: WaitLimits) -> list[RateLatency]:
    """The same for the requests of each rate, with errors, ratios and goodput; empty if they did not arrive over
    time."""
    if any(request.times is None for group in groups for result in group.results for request in result.both):
        return []
    rates = sorted({group.rate for group in groups}, key=lambda rate: rate or 0.0)
    return [_at_rate(rate, [group for group in groups if group.rate == rate], rows, limits) for rate in rates]


def _counted(group: Group, way: int, rows: int) -> list[DecodedRequest]:
    """The requests of a group, decoded one way, that are counted: if they arrive over time, without the first ones."""
    requests = [result.both[way] for result in group.results]
    over_time = all(request.times is not None for request in requests)
    return (requests[rows:] or requests) if over_time else requests


def _row(request: DecodedRequest) -> list[float]:
    """The columns of a request. The tokens of its first round come together, so they take no time after the first."""
    times = request.times
    assert times is not None
    later = len(request.tokens) - first_tokens(request)
    per_token = (times.finished - times.first_token) / later if later else np.nan
    waited, first = times.admitted - times.arrived, times.first_token - times.arrived
    return [waited, first, per_token, len(request.tokens), times.arrived, times.finished, later]


def _at_rate(rate: float | None, groups: Sequence[Group], rows: int, limits: WaitLimits) -> RateLatency:
    requests = {decoder: [_counted(group, way, rows) for group in groups] for way, decoder in enumerate(DECODERS)}
    segments = {decoder: [np.array([*map(_row, own)]) for own in each] for decoder, each in requests.items()}
    point, samples = _numbers(segments, [1] * len(groups), limits), _resampled(segments, limits)
    intervals = intervals_of(lambda s: s, [point], [samples], dict.fromkeys(point, len(groups)))
    counted = sum(map(len, segments["baseline"]))

    def interval(name: str, percentile: str) -> Interval:
        """The interval of a percentile, by its name in `_numbers`."""
        return intervals[f"{name} {percentile}"] if enough(int(percentile[1:]), counted) else None

    def ratio(delay: str, percentile: str) -> Factor | None:
        ours, plain = (point[f"{way} {delay} {percentile}"] for way in DECODERS)
        if not (np.isfinite(ours) and plain > 0):
            return None
        return Factor(ours / plain, interval(f"ratio {delay}", percentile))

    served = {
        way: Served(
            _latency_of(requests[way]),
            _nested({(delay, p): interval(f"{way} {delay}", p) for delay, p in DELAY_NAMES}),
            _goodput(way, point, intervals) if limits.first_token or limits.per_token else None,
            *_speeds(tables),
        )
        for way, tables in segments.items()
    }
    return RateLatency(rate, len(groups), counted, served, _nested({name: ratio(*name) for name in DELAY_NAMES}))


def _speeds(tables: Sequence[Floats]) -> tuple[float, float | None]:
    """Tokens per second of all requests together, and of one request after its first round."""
    table = np.concatenate(tables)
    later = table[table[:, PER_TOKEN] > 0]
    tokens, seconds = later[:, LATER].sum(), later[:, PER_TOKEN] @ later[:, LATER]
    return float(table[:, TOKENS].sum() / _duration(tables)), float(tokens / seconds) if tokens else None


def _duration(tables: Sequence[Floats]) -> float:
    """Seconds from the first arrival to the last token, of all segments."""
    return sum(float(table[:, FINISHED].max() - table[:, ARRIVED].min()) for table in tables)


def _goodput(way: str, point: Mapping[str, float], intervals: Mapping[str, Any]) -> Goodput:
    names = {"share": f"{way} share", "tokens_per_second": f"{way} tokens_per_second"}
    share, rate = (float(point[name]) for name in names.values())
    all_or_none = share in (0, 1)  # what is in every segment has no spread, which is no proof of no error
    return Goodput(share, rate, {short: None if all_or_none else intervals[name] for short, name in names.items()})


def _nested(flat: Mapping[tuple[str, str], Any]) -> dict[str, dict[str, Any]]:
    """{("queue", "p50"): x} becomes {"queue": {"p50": x}}."""
    return {delay: {name: value for (own, name), value in flat.items() if own == delay} for delay in DELAYS}


def _resampled(segments: Segments, limits: WaitLimits) -> dict[str, Floats] | None:
    """`_numbers` of segments that are drawn with replacement, [samples] each; None with fewer than FEWEST segments."""
    count = len(segments["baseline"])
    if count < FEWEST:
        return None
    found = [_numbers(segments, each, limits) for block in cluster_weights(count, SEGMENT_SAMPLES) for each in block]
    return {name: np.array([numbers[name] for numbers in found]) for name in found[0]}


def _numbers(segments: Segments, times: Sequence[int] | Any, limits: WaitLimits) -> dict[str, float]:
    """All numbers of both decoders, and the ratios of their delays, over each segment so many `times`."""
    numbers: dict[str, float] = {}
    for way, of_segments in segments.items():
        tables = [table for table, count in zip(of_segments, times, strict=True) for _ in range(count)]
        table = np.concatenate(tables)
        for column, delay in enumerate(DELAYS):
            seconds = table[np.isfinite(table[:, column]), column]
            found = np.percentile(seconds, PERCENTILES) if len(seconds) else np.full(len(PERCENTILES), np.nan)
            numbers |= {f"{way} {delay} p{p}": float(value) for p, value in zip(PERCENTILES, found, strict=True)}
        # A text that ends in its first round has no later tokens, which are in time.
        within = (table[:, FIRST_TOKEN] <= (limits.first_token or np.inf)) & ~(
            table[:, PER_TOKEN] > (limits.per_token or np.inf)
        )
        numbers[f"{way} share"] = float(within.mean())
        numbers[f"{way} tokens_per_second"] = table[within, TOKENS].sum() / _duration(tables)
    with np.errstate(divide="ignore", invalid="ignore"):
        for delay, p in DELAY_NAMES:
            ours, plain = (numbers[f"{way} {delay} {p}"] for way in DECODERS)
            numbers[f"ratio {delay} {p}"] = np.divide(ours, plain)
    return numbers
