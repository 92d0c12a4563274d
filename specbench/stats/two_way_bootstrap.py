"""Intervals of several processes on the same prompts: what varies between processes and what varies between prompts.

Processes and prompts are crossed. The variance of a pooled number has a part of the processes, with all that varies
within one, and a part that a prompt has in common in all of them; half of the interval is sqrt(t_P^2 V_P + t_C^2 V_C)
(Banerjee, 1960: it covers at least as often as it says; simulated in experiments/coverage).
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specbench.stats.bootstrap import (
    FEWEST,
    MOST_CLUSTERS,
    NOTHING,
    BootstrapSums,
    Counted,
    Formulas,
    SumNames,
    added,
    cluster_numbers,
    clusters_behind,
    interval_around,
    slopes,
    student,
)
from specbench.stats.estimates import Estimate, Floats, Interval
from specbench.stats.records import PerRequestSums

FEWEST_PROCESSES = 3  # with fewer there is no interval


@dataclass(frozen=True)
class VarianceParts:
    """Variances of one number: of what a process has in common, of what a prompt has in common in all processes, and of
    a prompt in a process."""

    process: float | None  # None: there is only one process
    prompt: float
    cell: float


@dataclass(frozen=True)
class TwoWaySums:
    """Sums over requests, by process and cluster of prompts: `table` [sums, processes, clusters] in the order of
    `point`, the sums over everything by name."""

    point: Mapping[str, Any]
    table: Floats

    @staticmethod
    def of(load: Callable[[], Iterable[PerRequestSums]]) -> "TwoWaySums":
        """From the sums of each process, which `load` gives anew at each call, one after the other: those of many
        prompts need not be in memory together. More than MOST_CLUSTERS clusters are joined by lot."""
        names, cluster_of = places(load())
        place_of = dict(zip(cluster_of, cluster_numbers([*cluster_of.values()]), strict=True))
        lots = np.arange(max(place_of.values()) + 1)
        if len(lots) > MOST_CLUSTERS:
            lots = np.random.default_rng(0).permutation(len(lots)) % MOST_CLUSTERS
        tables = []
        for sums in load():
            where = lots[[place_of[prompt] for prompt in sums.prompts]]
            columns = [sums.columns.get(name, np.zeros(len(where))) for name in names]
            tables.append([np.bincount(where, column, minlength=lots.max() + 1) for column in columns])
        table = np.array(tables).swapaxes(0, 1)
        return TwoWaySums(dict(zip(names, table.sum((1, 2)), strict=True)), table)

    def by_process(self, formulas: Formulas) -> dict[str, Floats]:
        """Each formula of the sums of every process alone: [processes]."""
        with np.errstate(divide="ignore", invalid="ignore"):
            found = formulas(dict(zip(self.point, self.table.sum(2), strict=True)))
        return {name: np.broadcast_to(value, self.table.shape[1]).astype(float) for name, value in found.items()}

    @property
    def clusters(self) -> int:
        """The number of clusters of prompts."""
        return int(self.table.shape[2])

    def intervals(self, formulas: Formulas, *, counted: Counted = NOTHING) -> dict[str, Interval]:
        """The 95 % interval of each of several formulas of sums, which are numbers or arrays: ratios that do not change
        if all sums are multiplied by one factor. Of the logarithm, if a formula's value is above 0."""
        with np.errstate(divide="ignore", invalid="ignore"):
            points = {name: float(value) for name, value in formulas(self.point).items()}
            if not self._has_intervals:
                return dict.fromkeys(points)
            found = slopes(formulas, self.point)
            return {name: self._interval(points[name], found[name], counted.get(name)) for name in points}

    def estimate(self, numerator: SumNames, denominator: SumNames, counted: str = "") -> Estimate:
        """The ratio of two sums, each of one name or of several that are added, with its standard error, which is None
        with too few processes or clusters. What is `counted` makes no difference."""
        above, below = (added(self.point, names) for names in (numerator, denominator))
        if not below > 0:
            return Estimate(None, None, 0)
        error = np.nan
        by_cluster = dict(zip(self.point, self.table.sum(1), strict=True))
        if self._has_intervals and (added(by_cluster, denominator) > 0).sum() >= FEWEST:
            with np.errstate(invalid="ignore"):
                slope = slopes(lambda s: {"": added(s, numerator) / added(s, denominator)}, self.point)[""]
                error = np.sqrt(sum(self._variances(slope)))
        return Estimate(float(above / below), float(error) if np.isfinite(error) else None, int(below))

    def process_share(self, formula: Callable[[Mapping[str, Any]], Any]) -> float | None:
        """t_P^2 V_P over the square of half the interval of a formula: what of it more processes would narrow."""
        if not self._has_intervals:
            return None
        with np.errstate(divide="ignore", invalid="ignore"):
            variances = self._variances(slopes(lambda s: {"": formula(s)}, self.point)[""])
            parts = [student(size - 1) ** 2 * v for size, v in zip(self.table.shape[1:], variances, strict=True)]
            share = float(parts[0] / np.sum(parts))
        return share if np.isfinite(share) else None

    @property
    def _has_intervals(self) -> bool:
        return bool(self.table.shape[1] >= FEWEST_PROCESSES and self.clusters >= FEWEST)

    def components(self, formulas: Formulas) -> dict[str, VarianceParts]:
        """The variance of each formula by its sources, for one process and one cluster of prompts; of the logarithm, if
        the formula's value is above 0."""
        with np.errstate(divide="ignore", invalid="ignore"):
            points = {name: float(value) for name, value in formulas(self.point).items()}
            found_slopes = slopes(formulas, self.point)
        processes, clusters = self.table.shape[1:]
        found = {}
        for name, point in points.items():
            of_process, of_prompt, cell = self._mean_squares(found_slopes[name] / (abs(point) or 1))
            if processes == 1:
                found[name] = VarianceParts(None, of_prompt, 0.0)
                continue
            parts = max(0.0, of_process - cell / clusters), max(0.0, of_prompt - cell / processes)
            found[name] = VarianceParts(*parts, cell)
        return found

    def _mean_squares(self, slope: Floats) -> tuple[float, float, float]:
        """From what each process and cluster adds to a formula with this slope [sums]: the variances of the means of
        processes and of clusters, and of what is left of a cell, which is 0 with one process."""
        used = slope != 0
        totals = self.table[used].sum((1, 2))
        cells: Floats = np.einsum("s,spc->pc", slope[used] / totals, self.table[used])
        processes, clusters = cells.shape
        cells = (cells - cells.mean()) * cells.size
        rows, columns = cells.mean(1), cells.mean(0)
        if processes == 1:
            return 0.0, float(columns.var(ddof=1)), 0.0
        rest = cells - rows[:, None] - columns
        cell = float((rest**2).sum() / ((processes - 1) * (clusters - 1)))
        return float(rows.var(ddof=1)), float(columns.var(ddof=1)), cell

    def _variances(self, slope: Floats) -> tuple[float, float]:
        """The variance of a formula from processes, with all that varies within one, and that from prompts alone."""
        processes, clusters = self.table.shape[1:]
        of_process, of_prompt, cell = self._mean_squares(slope)
        return of_process / processes, max(of_prompt / clusters - cell / (processes * clusters), 0.0)

    def _interval(self, point: float, slope: Floats, counted: str | None) -> Interval:
        """Half of it is sqrt(t_P^2 V_P + t_C^2 V_C)."""
        if not (np.isfinite(point) and np.isfinite(slope).all()):
            return None
        if (behind := clusters_behind(self.table.sum(1), slope, [*self.point], counted)) < FEWEST:
            return None
        variances = self._variances(slope / point if point > 0 else slope)
        quantiles = [student(size - 1) for size in (self.table.shape[1], behind)]
        half = float(np.sqrt(sum(t**2 * variance for t, variance in zip(quantiles, variances, strict=True))))
        return interval_around(point, half, of_log=point > 0)


Estimator = BootstrapSums | TwoWaySums


def places(processes: Iterable[PerRequestSums]) -> tuple[list[str], dict[str, Hashable]]:
    """The names of all sums, and the cluster of each prompt. If the processes joined the prompts in different ways, as
    where another order puts other rows together, each prompt is a cluster."""
    names: dict[str, None] = {}
    together: dict[str, Hashable] = {}
    alike = True
    for sums in processes:
        names |= dict.fromkeys(sums.columns)
        first: dict[int, str] = {}  # the least prompt of each cluster
        for prompt, cluster in zip(sums.prompts, sums.clusters, strict=True):
            first[cluster] = min(first.get(cluster, prompt), prompt)
        for prompt, cluster in zip(sums.prompts, sums.clusters, strict=True):
            alike = together.setdefault(prompt, first[cluster]) == first[cluster] and alike
    return list(names), together if alike else {prompt: prompt for prompt in together}


def relative_sd(values: Sequence[float] | Floats) -> float | None:
    """The standard deviation of the values over their mean; None if there are fewer than two, or one is not finite."""
    if len(values) < 2 or not np.isfinite(values).all() or not np.mean(values):
        return None
    return float(np.std(values, ddof=1) / abs(np.mean(values)))
