"""Waiting times between tokens, and of requests that arrive over time also in the queue, and goodput.

Of each segment of such requests the first ones, one for every row, find nothing to wait for and are not counted, unless
there are no others. Errors are those of a bootstrap over segments."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from specbench.stats.bootstrap import FEWEST, intervals_of
from specbench.stats.estimates import Factor, Floats, Goodput, Latency, Percentiles, RateLatency, Served
from specbench.stats.records import DecodedRequest, Group, call_seconds

PERCENTILES = (50, 90, 99)
ALL_PERCENTILES = (50, 90, 95, 99)  # percentiles, with those that have no interval
BEYOND = 5  # a percentile with fewer requests beyond it says nothing
SEGMENT_SAMPLES = 400
DELAYS = ("queue", "first_token", "per_token")
FIRST_TOKEN, PER_TOKEN, TOKENS, ARRIVED, FINISHED, LATER = 1, 2, 3, 4, 5, 6  # columns of a table, behind "queue"
DECODERS = ("speculative", "baseline")


class WaitLimits(Protocol):
    """What a request may wait, in seconds, to count for goodput; 0 is no limit."""

    @property
    def first_token(self) -> float: ...
    @property
    def per_token(self) -> float: ...


Segments = Mapping[str, Sequence[Floats]]  # by decoder, for each segment [requests, 7]


def enough(percentile: int, requests: int) -> bool:
    """Whether at least `BEYOND` of so many requests are beyond a percentile."""
    return requests * (100 - percentile) >= 100 * BEYOND


def latency(groups: Sequence[Group], rows: int) -> dict[str, Latency]:
    """Waiting times of all requests by decoder."""
    segments = segments_of(groups, rows)
    return {
        decoder: _latency_of([_counted(group, way, rows) for group in groups], segments.get(decoder, ()))
        for way, decoder in enumerate(DECODERS)
    }


def _latency_of(groups: Sequence[Sequence[DecodedRequest]], segments: Sequence[Floats]) -> Latency:
    """The waiting times of some groups of requests. A request alone has its first token after its prompt was read and
    its first round; of several that are there at once nothing says how long each waited."""
    requests = [request for group in groups for request in group]
    seconds = [call_seconds(request.rounds) for request in requests]
    if segments:
        delays = np.concatenate(segments)[:, : len(DELAYS)].T
        found = Latency(*(percentiles(seconds[np.isfinite(seconds)]) for seconds in delays))
    else:
        alone = all(len(group) == 1 for group in groups)
        later = [own[1:].sum() / (len(request.tokens) - first_tokens(request))
                 for request, own in zip(requests, seconds, strict=True) if len(own) > 1]  # fmt: skip
        firsts = [own[0] for own in seconds] if alone else []
        found = Latency(queue=percentiles([]), first_token=percentiles(firsts), per_token=percentiles(later))
    per_token = [
        own for each in zip(requests, seconds, strict=True) if (own := time_per_output_token(*each)) is not None
    ]
    gaps = np.concatenate([own[1:] for own in seconds])
    return replace(found, time_per_output_token=latency_summary(per_token), inter_token=latency_summary(gaps))


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
    """The same for the requests of each rate, with errors, ratios and goodput."""
    found = []
    for rate in sorted({group.rate for group in groups}, key=lambda rate: rate or 0.0):
        own = [group for group in groups if group.rate == rate]
        if segments_of(own, rows):
            found.append(_at_rate(rate, own, rows, limits))
    return found


def segments_of(groups: Sequence[Group], rows: int) -> Segments:
    """The requests of each group that are counted; empty if they did not arrive over time."""
    if any(request.times is None for group in groups for result in group.results for request in result.both):
        return {}
    return {
        decoder: [np.array([_row(request) for request in _counted(group, way, rows)]) for group in groups]
        for way, decoder in enumerate(DECODERS)
    }


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
    segments = segments_of(groups, rows)
    count = len(segments["baseline"])
    point, samples = _numbers(segments, range(count), limits), _resampled(segments, limits)
    intervals, ratios = (
        intervals_of(formulas, [point], [samples], count)
        for formulas in (
            lambda s: s,
            lambda s: {n: np.divide(*(s[f"{way} {n}"] for way in DECODERS)) for n in _names()},
        )
    )
    requests = sum(map(len, segments["baseline"]))
    known = {name: enough(int(name.partition(" p")[2]), requests) for name in _names()}

    def ratio(name: str) -> Factor | None:
        ours, plain = (point[f"{way} {name}"] for way in DECODERS)
        return Factor(ours / plain, ratios[name] if known[name] else None) if np.isfinite(ours) and plain > 0 else None

    def served(way: str) -> Served:
        ci95 = {name: intervals[f"{way} {name}"] if known[name] else None for name in _names()}
        counted = [_counted(group, DECODERS.index(way), rows) for group in groups]
        return Served(
            _latency_of(counted, segments[way]),
            _nested(ci95),
            _goodput(way, point, intervals, limits),
            *_speeds(segments[way]),
        )

    return RateLatency(
        rate, count, requests, {way: served(way) for way in DECODERS}, _nested({n: ratio(n) for n in _names()})
    )


def _speeds(tables: Sequence[Floats]) -> tuple[float, float | None]:
    """Tokens per second of all requests together, and of one request after its first round."""
    table = np.concatenate(tables)
    later = np.isfinite(table[:, PER_TOKEN]) & (table[:, PER_TOKEN] > 0)
    tokens = table[later, LATER].sum()
    seconds = (table[later, PER_TOKEN] * table[later, LATER]).sum()
    return float(table[:, TOKENS].sum() / _duration(tables)), float(tokens / seconds) if tokens else None


def _duration(tables: Sequence[Floats]) -> float:
    """Seconds from the first arrival to the last token, of all segments."""
    return sum(float(table[:, FINISHED].max() - table[:, ARRIVED].min()) for table in tables)


def _goodput(way: str, point: Mapping[str, float], intervals: Mapping[str, Any], limits: WaitLimits) -> Goodput | None:
    if not (limits.first_token or limits.per_token):
        return None
    names = {"share": f"{way} share", "tokens_per_second": f"{way} tokens_per_second"}
    share, rate = (float(point[name]) for name in names.values())
    all_or_none = share in (0, 1)  # what is in every segment has no spread, which is no proof of no error
    return Goodput(share, rate, {short: None if all_or_none else intervals[name] for short, name in names.items()})


def _names() -> Iterator[str]:
    """ "queue p50", and so on."""
    return (f"{delay} p{percentile}" for delay in DELAYS for percentile in PERCENTILES)


def _nested(flat: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """{"queue p50": x} becomes {"queue": {"p50": x}}."""
    return {delay: {f"p{p}": flat[f"{delay} p{p}"] for p in PERCENTILES} for delay in DELAYS}


def _resampled(segments: Segments, limits: WaitLimits) -> dict[str, Floats] | None:
    """`_numbers` of segments that are drawn with replacement, [samples] each; None with fewer than FEWEST segments."""
    count, generator = len(segments["baseline"]), np.random.default_rng(0)
    if count < FEWEST:
        return None
    found = [_numbers(segments, generator.integers(count, size=count), limits) for _ in range(SEGMENT_SAMPLES)]
    return {name: np.array([numbers[name] for numbers in found]) for name in found[0]}


def _numbers(segments: Segments, picks: Any, limits: WaitLimits) -> dict[str, float]:
    """All numbers of both decoders over the segments with these numbers."""
    numbers = {}
    for way, tables in segments.items():
        table = np.concatenate([tables[pick] for pick in picks])
        for name, value in zip(_names(), (p for delay in DELAYS for p in _percentiles(table, delay)), strict=True):
            numbers[f"{way} {name}"] = value
        within = _within(table, limits)
        seconds = _duration([tables[pick] for pick in picks])
        numbers |= {
            f"{way} share": float(within.mean()),
            f"{way} tokens_per_second": table[within, TOKENS].sum() / seconds,
        }
    return numbers


def _within(table: Floats, limits: WaitLimits) -> npt.NDArray[np.bool_]:
    """Which requests [requests] of a table are within the limits. A text that ends in its first round has no later
    tokens, which are in time."""
    first, per_token = limits.first_token or np.inf, limits.per_token or np.inf
    return (table[:, FIRST_TOKEN] <= first) & ~(table[:, PER_TOKEN] > per_token)


def _percentiles(table: Floats, delay: str) -> list[float]:
    """The percentiles of a delay over the requests of a table that have it; not numbers if none has."""
    seconds = table[:, DELAYS.index(delay)]
    seconds = seconds[np.isfinite(seconds)]
    return [float(value) for value in np.percentile(seconds, PERCENTILES)] if len(seconds) else [np.nan] * 3
