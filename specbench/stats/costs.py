"""Measured time of a round by the number of tokens that it drafts, for gamma policies and for replay."""

from array import array
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from functools import partial

import numpy as np

from specbench.decoding.timer import Lap, decoding_seconds
from specbench.stats.bootstrap import FEWEST, cluster_weights, halves
from specbench.stats.estimates import Floats, HalfCosts, Integers, RoundCost
from specbench.stats.records import DecodeResult, Result, Round

COST_SAMPLES = 200  # of the bootstrap of costs
FEWEST_ROUNDS = 8  # of a gamma: replay does not use the cost of fewer


def _floats() -> "array[float]":
    return array("d")


class CostTable:
    """Seconds of rounds by gamma and prompt, `source`, which policies may read while the run goes on; gammas are
    compared by medians, which interruptions do not move."""

    def __init__(self) -> None:
        self.source = ""
        self.laps: dict[int, array[float]] = defaultdict(_floats)  # by gamma, six numbers a round
        self._sources: dict[str, int] = {}  # a number for each source
        self._source_of: dict[int, array[int]] = defaultdict(partial(array, "i"))  # by gamma, the source of a round
        self.acceptance: tuple[float, int] = (0.0, 0)  # sum of betas, tested positions

    def add(self, rounds: Iterable[Round], pace: float = np.nan) -> None:
        """Adds rounds. A call that served several rows comes once for each of them. `pace` is what a row's share of a
        plain step took amidst probes, in seconds, since a machine's pace changes within a second."""
        source = self._sources.setdefault(self.source, len(self._sources))
        for r in rounds:
            draft, verify = r.seconds.get(Lap.DRAFT, 0.0), r.seconds[Lap.VERIFY]
            other = r.seconds[Lap.ACCEPT] + r.seconds[Lap.HOST]
            self.laps[r.steps].extend((draft, verify, other, (draft + verify + other) / r.rows, r.rows, pace))
            self._source_of[r.steps].append(source)
            self.acceptance = self.acceptance[0] + sum(r.beta), self.acceptance[1] + r.tested

    def join(self, other: "CostTable") -> None:
        """Adds the rounds of another table, behind those that are here."""
        numbers = [self._sources.setdefault(name, len(self._sources)) for name in other._sources]
        for gamma, laps in other.laps.items():
            self.laps[gamma].extend(laps)
            self._source_of[gamma].extend(numbers[source] for source in other._source_of[gamma])
        self.acceptance = self.acceptance[0] + other.acceptance[0], self.acceptance[1] + other.acceptance[1]

    @property
    def alpha(self) -> float:
        """Mean beta of all rounds so far; 1/2 before there is one."""
        total, tested = self.acceptance
        return (total + 0.5) / (tested + 1)

    def seconds(self, largest: int) -> Floats:
        """Seconds of a call with 0 .. largest drafter steps, [largest + 1]; on straight lines between and beyond the
        measured ones. They are of calls that served the most rows: at the end of a group they serve fewer."""
        known = sorted(self.laps)
        full = [table[table[:, 4] == table[:, 4].max(), :3].sum(1) for table in map(self._table, known)]
        return extend(known, [float(np.median(seconds)) for seconds in full], largest)

    def _table(self, gamma: int) -> Floats:
        """[rounds, 6]: seconds of draft, verify, other, a row's share of all three, the rows of the call, the pace."""
        return np.reshape(self.laps[gamma], (-1, 6))

    def summary(self) -> list[RoundCost]:
        """Seconds of a round by the number of tokens that it drafts."""
        return _summary({g: self._table(g) for g in sorted(self.laps)})

    def summary_of(self, sources: Collection[str], step: float) -> list[RoundCost]:
        """The same from the rounds of these sources alone, as if plain steps had always taken `step` seconds: medians
        of seconds over the pace beside them. Empty if they have none."""
        tables = {g: table[of >= 0] for g, (table, of) in self._by_source([sources], step).items()}
        return [_cost(g, np.median(table, axis=0), len(table)) for g, table in tables.items() if len(table)]

    def prompts_of(self, clusters: Sequence[Collection[str]], gammas: Sequence[int]) -> list[int]:
        """How many of these clusters of sources have rounds with each of these gammas."""
        tables = self._by_source(clusters)
        return [len({*tables[g][1].tolist()} - {-1}) for g in gammas]

    def covariance(self, clusters: Sequence[Collection[str]], gammas: Sequence[int], step: float) -> Floats:
        """The covariance [G, G] of the `fitted` shares of `summary_of(all of these sources)` at these gammas, in
        seconds of a row's share squared: of a bootstrap over clusters of sources."""
        tables = self._by_source(clusters, step)
        weights = np.concatenate([*cluster_weights(len(clusters), COST_SAMPLES)])
        samples = _resampled_shares({g: (tables[g][0][:, 3], tables[g][1]) for g in gammas}, weights)
        counts = np.array(self.prompts_of(clusters, gammas))  # of which a sample's variance is too small by 1 / count
        scale = np.sqrt(counts / np.maximum(counts - 1, 1))
        found: Floats = np.atleast_2d(np.cov(samples.T)) * np.outer(scale, scale)
        return found

    def _by_source(self, clusters: Sequence[Collection[str]], step: float = 1.0) -> dict[int, tuple[Floats, Integers]]:
        """By gamma, the table [rounds, 6] of rounds whose pace is known, with seconds as if it had been `step`, and the
        number of each round's cluster [rounds], -1 for other sources."""
        cluster_of = np.full(len(self._sources), -1)
        for number, names in enumerate(clusters):
            cluster_of[[self._sources[name] for name in names if name in self._sources]] = number
        found: dict[int, tuple[Floats, Integers]] = {}
        for g in sorted(self.laps):
            table, of = self._table(g), cluster_of[np.array(self._source_of[g], int)]
            known = np.isfinite(table[:, 5])
            table, of = table[known], of[known]
            found[g] = np.hstack([table[:, :4] * step / table[:, 5:], table[:, 4:]]), of
        return found


def _summary(tables: Mapping[int, Floats]) -> list[RoundCost]:
    """From tables [rounds, 6] by gamma: medians, all scaled to the level of the mean."""
    medians = {g: np.median(laps, axis=0) for g, laps in tables.items()}
    total = sum(laps[:, 3].sum() for laps in tables.values())
    predicted = sum(medians[g][3] * len(laps) for g, laps in tables.items())
    return [_cost(g, m * (total / predicted), len(tables[g])) for g, m in medians.items()]


def _cost(gamma: int, laps: Floats, rounds: int) -> RoundCost:
    """From seconds of draft, verify, other, and a row's share of all three."""
    draft, verify, other, share = map(float, laps[:4])
    return RoundCost(gamma, draft, verify, other, share, rounds)


def _resampled_shares(shares: Mapping[int, tuple[Floats, Integers]], weights: Integers) -> Floats:
    """The fitted shares [samples, gammas] of `summary_of` if cluster k occurs weights[:, k] times, from the shares
    [rounds] and their clusters [rounds] by gamma. A gamma without rounds in a sample is on a line between the others.
    """
    gammas = list(shares)
    medians = np.full((len(weights), len(gammas)), np.nan)
    counts = np.zeros_like(medians)
    for place, (share, cluster) in enumerate(shares.values()):
        order = np.argsort(share)
        order = order[cluster[order] >= 0]
        share, cluster = share[order], cluster[order]
        for sample, weight in enumerate(weights):
            times = weight[cluster].cumsum()
            if len(times) and times[-1]:
                medians[sample, place] = share[np.searchsorted(times, times[-1] / 2)]
                counts[sample, place] = times[-1]
    there = counts.any(1)  # samples with a round
    medians, counts = medians[there], counts[there]
    for row in medians:
        known = np.flatnonzero(np.isfinite(row))
        row[:] = extend([gammas[place] for place in known], row[known], gammas[-1])[gammas]
    return monotone(medians, counts)


def monotone(values: Floats, weights: Floats | Integers) -> Floats:
    """The least squares fit [..., G] of values [..., G] that may not fall from one to the next, by weights: at each
    place the largest, over beginnings, of the smallest mean from there to an end at or after it."""
    weights = np.maximum(weights, 1e-9)
    sums, totals = (
        np.concatenate([np.zeros_like(x[..., :1]), x.cumsum(-1)], -1) for x in (values * weights, weights * 1.0)
    )
    found = np.empty(values.shape)
    for place in range(values.shape[-1]):
        ends, begins = (slice(place + 1, None), None), (None, slice(0, place + 1))
        spans = [(x[..., *ends] - x[..., *begins]) for x in (sums, totals)]  # [..., ends, beginnings]
        found[..., place] = (spans[0] / spans[1]).min(-2).max(-1)
    return found


def fitted(costs: Sequence[RoundCost]) -> tuple[list[int], Floats]:
    """Gammas with at least FEWEST_ROUNDS rounds, and a row's share of a round with each: a longer draft costs no less,
    so where one was measured to, both are at their mean."""
    known = [cost for cost in costs if cost.rounds >= FEWEST_ROUNDS]
    shares, rounds = np.array([[cost.share, cost.rounds] for cost in known]).reshape(-1, 2).T
    return [cost.gamma for cost in known], monotone(shares, rounds)


def extend(gammas: Sequence[int], values: Sequence[float] | Floats, largest: int) -> Floats:
    """Values at 0 .. largest, [largest + 1], from values at some gammas: straight lines between and beyond them."""
    wanted = np.arange(largest + 1)
    found = np.interp(wanted, gammas, values)
    if len(gammas) > 1:
        for beyond, end, inner in ((wanted < gammas[0], 0, 1), (wanted > gammas[-1], -1, -2)):
            slope = (values[inner] - values[end]) / (gammas[inner] - gammas[end])
            found = np.where(beyond, values[end] + slope * (wanted - gammas[end]), found)
    return found


def half_costs(table: CostTable, results: Sequence[Result], clusters: Sequence[Hashable]) -> list[HalfCosts]:
    """What rounds of probes cost on each half of the prompts; empty if one of them would have fewer than FEWEST
    clusters whose text replay can use. `clusters` of each result; rounds are known by their group, so no cluster
    divides one."""
    half_of, found = halves(clusters), []
    used = [result.baseline for result in results if result.speculative_laws is not None]
    step = sum(plain.seconds for plain in used) / max(1, sum(len(plain.tokens) for plain in used))
    for half in (0, 1) if half_of else ():
        sources: dict[Hashable, set[str]] = {}  # prompts by cluster
        texts: dict[Hashable, list[str]] = {}
        for result, cluster in zip(results, clusters, strict=True):
            if half_of[cluster] == half:
                sources.setdefault(cluster, set()).add(result.request.prompt_id)
                if result.speculative_laws is not None:
                    texts.setdefault(cluster, []).append(result.request.id)
        by_gamma = table.summary_of(set[str]().union(*sources.values()), step)
        gammas, every = [cost.gamma for cost in by_gamma], [*sources.values()]
        covariance = table.covariance(every, gammas, step).tolist()
        found.append(HalfCosts([*texts.values()], by_gamma, covariance, table.prompts_of(every, gammas)))
    return found if all(len(half.clusters) >= FEWEST for half in found) else []


def pace_of(plain: DecodeResult) -> float:
    """The median of a row's share of plain decoding's steps, in seconds, without each text's first one."""
    steps = [decoding_seconds(r.seconds) / r.rows for each in plain.requests for r in each.rounds[1:]]
    return float(np.median(steps)) if steps else np.nan
