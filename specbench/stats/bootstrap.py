"""Ratios of sums with standard errors and intervals, from raw counts and seconds of each request.

Requests that may have something in common beside the settings form a cluster: the turns of one prompt and, where times
are concerned, the rows that were decoded together. Clusters are what is resampled.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from specbench.results.schema import Estimate, Interval

BOOTSTRAP_SAMPLES = 10_000
MOST_PICKS = 1_000_000  # clusters drawn at a time, which bounds memory
MOST_CLUSTERS = 2000  # that are resampled: more of them are joined by lot first
FEWEST = 5  # clusters: with fewer there is no interval
Floats = npt.NDArray[np.float64]


def ratio(numerators: Sequence[float], denominators: Sequence[float], clusters: Sequence[Hashable] = ()) -> Estimate:
    """sum(numerators) / sum(denominators), with one entry per request. The standard error is the linearised one for
    clustered data; it is None with fewer than FEWEST clusters. Without `clusters` each request is one."""
    a, b = by_cluster(np.array([numerators, denominators], float), clusters)
    total, count = b.sum(), len(b)
    if total == 0:
        return Estimate(None, None, 0)
    mean = a.sum() / total
    if (b > 0).sum() < FEWEST:
        return Estimate(float(mean), None, int(total))
    residuals = a - mean * b
    stderr = np.sqrt(count / (count - 1) * (residuals**2).sum()) / total
    return Estimate(float(mean), float(stderr), int(total))


def by_cluster(data: Floats, clusters: Sequence[Hashable]) -> Floats:
    """The sums [columns, clusters] of a table [columns, requests]; clusters [requests], or none if each is its own."""
    if not clusters:
        return data
    numbers = {name: number for number, name in enumerate(dict.fromkeys(clusters))}
    sums = np.zeros((len(numbers), len(data)))
    np.add.at(sums, np.array([numbers[name] for name in clusters]), data.T)
    return sums.T


@dataclass(frozen=True)
class Sums:
    """Sums over all requests by name, the same sums [samples] over clusters drawn with replacement (None if there are
    fewer than FEWEST), and the number of clusters."""

    point: Mapping[str, Any]  # numpy's floats, which divide by 0
    samples: Mapping[str, Floats] | None
    clusters: int

    @staticmethod
    def of(rows: Sequence[Mapping[str, float]], clusters: Sequence[Hashable] = ()) -> "Sums":
        """From the sums of each request, all with the same names."""
        return Sums.of_columns({name: np.array([row[name] for row in rows], float) for name in rows[0]}, clusters)

    @staticmethod
    def of_columns(columns: Mapping[str, Floats], clusters: Sequence[Hashable] = ()) -> "Sums":
        """The same from columns [requests] by name, as `RequestSums` has them."""
        names = list(columns)
        table = by_cluster(np.stack([columns[name] for name in names]), clusters)
        point, count = dict(zip(names, table.sum(-1), strict=True)), table.shape[1]
        samples = None if count < FEWEST else dict(zip(names, resampled_sums(table), strict=True))
        return Sums(point, samples, count)

    def intervals(self, formulas: Callable[..., Mapping[str, Any]], *others: "Sums") -> dict[str, Interval]:
        """The 95 % interval of each of several formulas of sums, which are numbers or arrays [samples]; with `others`,
        over the same clusters, of these sums and theirs."""
        every = (self, *others)
        with np.errstate(divide="ignore", invalid="ignore"):  # a sample may hold none of what a formula counts
            points = formulas(*(sums.point for sums in every))
            if self.samples is None:
                return dict.fromkeys(points)
            samples = formulas(*(sums.samples for sums in every))
        return {name: self._interval(float(points[name]), np.asarray(samples[name])) for name in points}

    def stderr(self, samples: Floats) -> float:
        """The bootstrap's standard error of what was computed from `self.samples`, [samples]. Drawing n clusters out of
        n gives the variance of a sum less by (n - 1) / n."""
        return float(np.std(samples) * np.sqrt(self.clusters / (self.clusters - 1)))

    def _interval(self, point: float, samples: Floats) -> Interval:
        """Student's interval around a point with the bootstrap's standard error, of the logarithm where all samples are
        above 0. Percentiles of the samples would be too narrow: by a factor of 1.6 with five clusters."""
        samples = samples[np.isfinite(samples)]
        if not (np.isfinite(point) and len(samples)):
            return None
        of_log = point > 0 and bool((samples > 0).all())
        half = student(self.clusters - 1) * self.stderr(np.log(samples) if of_log else samples)
        low, high = (point * np.exp([-half, half])) if of_log else (point - half, point + half)
        return float(low), float(high)


def joined(data: Floats) -> Floats:
    """The table [columns, clusters], or if these are more than MOST_CLUSTERS, sums over so many groups of them, which
    are drawn by lot and equal in size up to one cluster."""
    clusters = data.shape[1]
    if clusters <= MOST_CLUSTERS:
        return data
    order = np.random.default_rng(0).permutation(clusters)
    begins = np.arange(MOST_CLUSTERS) * clusters // MOST_CLUSTERS
    return np.stack([np.add.reduceat(column[order], begins) for column in data])


def student(freedom: float) -> float:
    """The .975 quantile of Student's distribution: below 4 degrees of freedom by integrating its density, else by its
    expansion around the normal one (Abramowitz and Stegun, 26.7.5), within .3 %."""
    if freedom < 4:
        angle = np.linspace(0, np.pi / 2, 20_001)  # t = sqrt(freedom) tan(angle)
        density = np.cos(angle) ** (freedom - 1)
        below = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
        return float(np.sqrt(freedom) * np.tan(np.interp(0.95, below / below[-1], angle)))
    z = 1.959964
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom ** (power + 1) for power, term in enumerate(terms))


def student_tail(t: float, freedom: float) -> float:
    """The probability that Student's t is farther from 0 than this one: the integral of its density, in which t is
    sqrt(freedom) tan(angle), so that the range is finite."""
    angles = np.linspace(0, np.pi / 2, 20_001)
    density = np.cos(angles) ** (freedom - 1)
    beyond = angles >= np.arctan(t / np.sqrt(freedom))
    return float(density[beyond].sum() / density.sum())


def speedup_interval(
    baseline: Sequence[float],
    baseline_tokens: Sequence[int],
    ours: Sequence[float],
    our_tokens: Sequence[int],
    clusters: Sequence[Hashable] = (),
) -> tuple[float, Interval]:
    """Baseline seconds per token / our seconds per token, with its 95 % interval from a paired bootstrap over clusters.
    With equal token counts it is the ratio of total times."""
    names = ("baseline", "baseline_tokens", "ours", "our_tokens")
    table = zip(baseline, baseline_tokens, ours, our_tokens, strict=True)
    sums = Sums.of([dict(zip(names, row, strict=True)) for row in table], clusters)

    def formulas(s: Mapping[str, Any]) -> dict[str, Any]:
        return {"speedup": (s["baseline"] / s["baseline_tokens"]) / (s["ours"] / s["our_tokens"])}

    with np.errstate(divide="ignore", invalid="ignore"):
        return float(formulas(sums.point)["speedup"]), sums.intervals(formulas)["speedup"]


def resampled_sums(data: Floats) -> Floats:
    """Sums [columns, samples] of a table [columns, clusters] over clusters drawn with replacement: the paired
    bootstrap. Every call draws the same clusters. Of many clusters, joined ones are drawn: the error is that of the
    clusters up to 3 %, which is what MOST_CLUSTERS tell of a standard deviation."""
    data = joined(data)
    clusters, generator = data.shape[1], np.random.default_rng(0)
    at_a_time = max(1, MOST_PICKS // clusters)
    sums = []
    for begin in range(0, BOOTSTRAP_SAMPLES, at_a_time):
        samples = min(at_a_time, BOOTSTRAP_SAMPLES - begin)
        picks = generator.integers(clusters, size=(samples, clusters)) + clusters * np.arange(samples)[:, None]
        weights = np.bincount(picks.ravel(), minlength=samples * clusters).reshape(samples, clusters)
        sums.append(data @ weights.T.astype(float))
    return np.concatenate(sums, 1)
