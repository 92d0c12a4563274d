"""Sums over the requests of one process: ratios with standard errors, and intervals of a bootstrap over clusters, which
are requests that have something in common beside the settings."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from types import MappingProxyType
from typing import Any

import numpy as np

from specbench.stats.estimates import Estimate, Floats, Integers, Interval
from specbench.stats.formulas import speedup_of
from specbench.stats.records import PerRequestSums, Result, RunRecord

BOOTSTRAP_SAMPLES = 10_000
MOST_PICKS = 1_000_000  # clusters drawn at a time, which bounds memory
MOST_CLUSTERS = 2000  # that are resampled: more of them are joined by lot first
FEWEST = 5  # clusters: with fewer there is no interval
MOST_UNITS = 1_000_000  # that an interval may need
CHANGE = 1e-4  # of each sum, relative, for the slope of a formula
SumNames = str | Sequence[str]  # of a sum, or of several that are added
Formulas = Callable[..., Mapping[str, Any]]  # of sums by name, which are numbers or arrays
Counted = Mapping[str, str]  # by formula, a sum: a cluster in which it is 0 tells nothing of the formula
NOTHING: Counted = MappingProxyType({})


class BootstrapSums:
    """The sums of one process, by name and request: columns [requests]."""

    def __init__(
        self, columns: Mapping[str, Floats], clusters: Sequence[Hashable] = (), prompts: Sequence[Hashable] = ()
    ):
        """`clusters` [requests] are those of times, `prompts` those of acceptance; without any each request is one."""
        self.columns, self._clusters, self._prompts = columns, clusters, prompts
        self.point: Mapping[str, Any] = {name: column.sum() for name, column in columns.items()}

    @staticmethod
    def of(sums: PerRequestSums) -> "BootstrapSums":
        """From what sums.parquet holds."""
        return BootstrapSums(sums.columns, sums.clusters, sums.prompts)

    @cached_property
    def _by_cluster(self) -> Floats:
        return by_cluster(np.stack([*self.columns.values()]), self._clusters)

    @property
    def clusters(self) -> int:
        """The number of clusters."""
        return int(self._by_cluster.shape[1])

    @cached_property
    def samples(self) -> Mapping[str, Floats] | None:
        """The sums over clusters drawn with replacement, [samples] by name; None with fewer than FEWEST clusters."""
        if self.clusters < FEWEST:
            return None
        return dict(zip(self.columns, resampled_sums(self._by_cluster), strict=True))

    def estimate(self, numerator: SumNames, denominator: SumNames, counted: str = "") -> Estimate:
        """The ratio of two sums, with prompts as clusters; of the requests alone whose sum `counted` is not 0."""
        nothing = np.zeros(len(next(iter(self.columns.values()))))
        above, below = (nothing + added(self.columns, names) for names in (numerator, denominator))
        if not counted:
            return ratio(above, below, self._prompts)
        kept = np.flatnonzero(self.columns.get(counted, nothing)).tolist()
        return ratio(above[kept], below[kept], [self._prompts[i] for i in kept] if self._prompts else ())

    def intervals(
        self, formulas: Formulas, *others: "BootstrapSums", counted: Counted = NOTHING
    ) -> dict[str, Interval]:
        """The 95 % interval of each of several formulas; with `others`, over the same clusters, of these sums and
        theirs."""
        every = (self, *others)
        points = [s.point for s in every]
        table = np.concatenate([s._by_cluster for s in every])
        with np.errstate(divide="ignore", invalid="ignore"):
            found = slopes(formulas, *points)
        names = [name for one in points for name in one]
        counts = {name: clusters_behind(table, slope, names, counted.get(name)) for name, slope in found.items()}
        return intervals_of(formulas, points, [s.samples for s in every], counts)

    def stderr(self, samples: Floats) -> float:
        """The bootstrap's standard error of what was computed from `self.samples`, [samples]."""
        return _stderr(samples, self.clusters)


def added(columns: Mapping[str, Any], names: SumNames) -> Any:
    """The sum of these columns; one that is not there is 0."""
    return sum(columns.get(name, 0.0) for name in ([names] if isinstance(names, str) else names))


def slopes(formulas: Formulas, *points: Mapping[str, Any]) -> dict[str, Floats]:
    """By formula, [sums of all its arguments]: its change with the logarithm of each sum."""
    point, ends = np.array([value for one in points for value in one.values()], float), []
    for sign in (1, -1):
        changed = iter(point[:, None] * (1 + sign * CHANGE * np.eye(len(point))))  # [sums, which of them is changed]
        found = formulas(*({name: next(changed) for name in one} for one in points))
        ends.append({name: np.broadcast_to(value, len(point)) for name, value in found.items()})
    return {name: (ends[0][name] - ends[1][name]) / (2 * CHANGE) for name in ends[0]}


def clusters_behind(table: Floats, slope: Floats, names: Sequence[str], counted: str | None) -> int:
    """How many clusters of a table [sums, clusters] say something of a formula, by its slope [sums]: those in which a
    sum is not 0 with which it changes, all if it changes with none. At most those that have the sum `counted`, of each
    run that has any: c changes with the time of plain decoding, which all have, and is known where a drafter ran."""
    has = table != 0
    every = [int(has[slope != 0].any(0).sum()) if slope.any() else table.shape[1]]
    return min(every + [int(own.sum()) for name, own in zip(names, has, strict=True) if name == counted and own.any()])


def intervals_of(
    formulas: Formulas,
    points: Sequence[Mapping[str, Any]],
    samples: Sequence[Mapping[str, Floats] | None],
    counts: Mapping[str, int],
) -> dict[str, Interval]:
    """Student's interval of each of several formulas with the bootstrap's standard error, of the logarithm where all
    samples are above 0: from their arguments over everything, the same arguments resampled, [samples] each, and the
    number of resampled clusters that say something of it; None where these are fewer than FEWEST, or there are no
    samples. Percentiles of the samples would be too narrow: by a factor of 1.6 with five clusters."""
    with np.errstate(divide="ignore", invalid="ignore"):  # a sample may hold none of what a formula counts
        found = formulas(*points)
        if any(one is None for one in samples):
            return dict.fromkeys(found)
        resampled = formulas(*samples)
    intervals: dict[str, Interval] = {}
    for name, point in found.items():
        known, count = np.asarray(resampled[name]), max(counts[name], 2)
        known = known[np.isfinite(known)]
        of_log = bool(point > 0 and (known > 0).all())
        error = _stderr(np.log(known) if of_log else known, count) if len(known) else np.nan
        interval = interval_around(float(point), student(count - 1) * error, of_log)
        intervals[name] = None if counts[name] < FEWEST else interval
    return intervals


def interval_around(point: float, half: float, of_log: bool) -> Interval:
    """The interval around a number, or around its logarithm, with this half; None if one is not finite."""
    if not (np.isfinite(point) and np.isfinite(half)):
        return None
    low, high = point * np.exp([-half, half]) if of_log else (point - half, point + half)
    return float(low), float(high)


def fewest(half: Callable[[int], float], wanted: float) -> int | None:
    """The fewest units whose interval has at most the wanted half, by bisection; None if MOST_UNITS do not."""
    low, high = FEWEST - 1, MOST_UNITS
    if half(high) > wanted:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if half(middle) <= wanted else (middle, high)
    return high


def units_needed(found: Interval, units: int, wanted: float, capped: bool = False, outside: float = 0.05) -> int | None:
    """The units that an interval of the logarithm of +- `wanted` needs, if they vary as the `units` of the one that was
    found; both miss the truth with the probability `outside`. If their number is `capped` they become larger instead,
    and Student's quantile stays what it is."""
    if found is None or found[0] <= 0:
        return None
    spread = np.log(found[1] / found[0]) / 2 / student(units - 1, outside) * np.sqrt(units)
    return fewest(lambda n: float(student((units if capped else n) - 1, outside) * spread / np.sqrt(n)), wanted)


def _stderr(samples: Floats, count: int) -> float:
    """Drawing n clusters out of n gives the variance of a sum less by (n - 1) / n."""
    return float(np.std(samples) * np.sqrt(count / (count - 1)))


def ratio(
    numerators: Sequence[float] | Floats, denominators: Sequence[float] | Floats, clusters: Sequence[Hashable] = ()
) -> Estimate:
    """sum(numerators) / sum(denominators), with one entry per request. The standard error is the linearised one for
    clustered data; it is None with fewer than FEWEST clusters. Without `clusters` each request is one."""
    a, b = by_cluster(np.array([numerators, denominators], float), clusters)
    total = b.sum()
    if total == 0:
        return Estimate(None, None, 0)
    mean = a.sum() / total
    if (b > 0).sum() < FEWEST:
        return Estimate(float(mean), None, int(total))
    return Estimate(float(mean), ratio_error(a, b), int(total))


def ratio_error(numerators: Floats, denominators: Floats) -> float:
    """The linearised standard error of sum(numerators) / sum(denominators), with one entry for each of two clusters or
    more."""
    total, count = denominators.sum(), len(denominators)
    residuals = numerators - numerators.sum() / total * denominators
    return float(np.sqrt(count / (count - 1) * (residuals**2).sum()) / total)


def speedup_interval(
    baseline: Sequence[float],
    baseline_tokens: Sequence[int],
    ours: Sequence[float],
    our_tokens: Sequence[int],
    clusters: Sequence[Hashable] = (),
) -> tuple[float, Interval]:
    """Baseline seconds per token / our seconds per token, with its 95 % interval from a paired bootstrap over clusters.
    With equal token counts it is the ratio of total times."""
    columns = {"plain_seconds": baseline, "plain_tokens": baseline_tokens, "seconds": ours, "tokens": our_tokens}
    sums = BootstrapSums({name: np.array(column, float) for name, column in columns.items()}, clusters)
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(speedup_of(sums.point)), sums.intervals(lambda s: {"speedup": speedup_of(s)})["speedup"]


def by_cluster(data: Floats, clusters: Sequence[Hashable]) -> Floats:
    """The sums [columns, clusters] of a table [columns, requests]; clusters [requests], or none if each is its own."""
    if not clusters:
        return data
    where = cluster_numbers(clusters)
    return np.stack([np.bincount(where, row) for row in data])


def cluster_numbers(names: Sequence[Hashable]) -> list[int]:
    """The number of each name, in the order in which they come first."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return [numbers[name] for name in names]


def joined(data: Floats) -> Floats:
    """The table [columns, clusters], or if these are more than MOST_CLUSTERS, sums over so many groups of them, which
    are drawn by lot and equal in size up to one cluster."""
    clusters = data.shape[1]
    if clusters <= MOST_CLUSTERS:
        return data
    order = np.random.default_rng(0).permutation(clusters)
    begins = np.arange(MOST_CLUSTERS) * clusters // MOST_CLUSTERS
    return np.stack([np.add.reduceat(column[order], begins) for column in data])


def cluster_weights(clusters: int, samples: int = BOOTSTRAP_SAMPLES) -> Iterator[Integers]:
    """How often each cluster is in each sample, drawn with replacement: [some of the samples, clusters] after each
    other. Every call draws the same."""
    generator, at_a_time = np.random.default_rng(0), max(1, MOST_PICKS // clusters)
    for begin in range(0, samples, at_a_time):
        size = min(at_a_time, samples - begin)
        picks = generator.integers(clusters, size=(size, clusters)) + clusters * np.arange(size)[:, None]
        yield np.bincount(picks.ravel(), minlength=size * clusters).reshape(size, clusters)


def resampled_sums(data: Floats) -> Floats:
    """Sums [columns, samples] of a table [columns, clusters] over clusters (of many, joined ones) drawn with
    replacement: the paired bootstrap."""
    data = joined(data)
    return np.concatenate([data @ weights.T.astype(float) for weights in cluster_weights(data.shape[1])], 1)


@cache
def student(freedom: float, outside: float = 0.05) -> float:
    """The t from which Student's is farther from 0 with the probability `outside`, by integrating its density."""
    freedom = min(freedom, 1e4)  # the normal distribution, within 2e-4
    angle, density = _student_density(freedom)
    below = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return float(np.sqrt(freedom) * np.tan(np.interp(1 - outside, below / below[-1], angle)))


def student_tail(t: float, freedom: float) -> float:
    """The probability that Student's t is farther from 0 than this one."""
    angle, density = _student_density(freedom)
    return float(density[angle >= np.arctan(t / np.sqrt(freedom))].sum() / density.sum())


def _student_density(freedom: float) -> tuple[Floats, Floats]:
    """Angles and Student's density there, with t = sqrt(freedom) tan(angle), so that the range is finite."""
    angle = np.linspace(0, np.pi / 2, 20_001)
    return angle, np.cos(angle) ** (freedom - 1)


def prompt_clusters(results: Sequence[Result]) -> list[Hashable]:
    """For the acceptance of guesses: the turns of one prompt are one cluster."""
    return [result.request.prompt_id for result in results]


def time_clusters(record: RunRecord, batch_size: int) -> list[Hashable]:
    """For times: with several rows also the requests of one group, which share calls."""
    return prompt_clusters(record.results) if batch_size == 1 else group_clusters(record)


def group_clusters(record: RunRecord) -> list[Hashable]:
    """The requests of one group are one cluster, and so are groups that share a prompt."""
    cluster_of: dict[str, int] = {}
    for number, group in enumerate(record.groups):
        prompts = {result.request.prompt_id for result in group.results}
        joined = {cluster_of[prompt] for prompt in prompts if prompt in cluster_of}
        if joined:  # a later turn of prompts that are known
            cluster_of |= {prompt: number for prompt, cluster in cluster_of.items() if cluster in joined}
        cluster_of |= dict.fromkeys(prompts, number)
    return [cluster_of[result.request.prompt_id] for result in record.results]


def halves(clusters: Sequence[Hashable]) -> dict[Hashable, int]:
    """0 or 1 for each cluster: halves of a run, which share each two clusters that follow each other by lot, so that a
    machine's drift is the same in both. Empty if a half would have fewer than FEWEST clusters."""
    names = list(dict.fromkeys(clusters))
    if len(names) < 2 * FEWEST:
        return {}
    lots = np.random.default_rng(0).integers(2, size=(len(names) + 1) // 2)
    return {name: int(lots[place // 2] ^ (place % 2)) for place, name in enumerate(names)}
