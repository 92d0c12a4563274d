"""The numbers of a run by category, place in the round, kind of token, entropy and rows, from sums over requests: those
of one process, or of several."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from specbench.results.schema_parts import (
    Acceptance,
    AcceptanceCheck,
    CategoryNumbers,
    ConfidenceBin,
    DrafterCalibration,
    EntropyBin,
    Estimate,
    GeometricMean,
    Interval,
    Rate,
    RowsRate,
    SpeedupOfSome,
)
from specbench.stats.accounting import DRAFTS, speedup_of
from specbench.stats.bootstrap import Sums, ratio
from specbench.stats.metrics.calibration import calibration_error
from specbench.stats.records import Floats, PerRequestSums
from specbench.stats.request_sums import TESTED_AT, end_to_end, rates
from specbench.stats.round_sums import (
    ACCEPTED_CLASS,
    ACCEPTED_OF,
    CONFIDENCE_BINS,
    ENTROPY_EDGES,
    MODELS,
    TESTED_CLASS,
    WAYS,
)
from specbench.stats.token_types import CLASSES

LEAST_VARIANCE = 9.0  # of the number of accepted guesses, for its distance to be measured by a normal
Names = str | Sequence[str]  # of a sum, or of several that are added
OF_TIMES = ("tokens", "seconds", "prefill_seconds", "plain_tokens", "plain_seconds", "plain_prefill_seconds",
            "call_seconds", "plain_call_seconds", "log_speedup", "requests")  # fmt: skip


class Source(Protocol):
    """Sums over everything by name, and what follows from them. `CrossedSums` is one too."""

    @property
    def point(self) -> Mapping[str, Any]: ...

    def estimate(self, numerator: Names, denominator: Names) -> Estimate:
        """The ratio of two sums, with its standard error."""

    def intervals(self, formulas: Callable[..., Mapping[str, Any]]) -> dict[str, Interval]:
        """The 95 % interval of each of several formulas of sums."""


def only(sums: PerRequestSums, where: Sequence[int]) -> PerRequestSums:
    """The sums of the requests with these numbers."""
    requests, prompts, categories = (
        [names[i] for i in where] for names in (sums.requests, sums.prompts, sums.categories)
    )
    clusters, processes = ([numbers[i] for i in where] for numbers in (sums.clusters, sums.processes))
    columns = {name: column[list(where)] for name, column in sums.columns.items()}
    return PerRequestSums(requests, prompts, categories, clusters, processes, columns)


class BootstrapSums:
    """The sums of one process."""

    def __init__(self, sums: PerRequestSums):
        self.columns, self._prompts, self._clusters = sums.columns, sums.prompts, sums.clusters
        self.point = {name: column.sum() for name, column in self.columns.items()}

    def estimate(self, numerator: Names, denominator: Names) -> Estimate:
        """The ratio of two sums, with prompts as clusters."""
        above, below = (self._sum(names) for names in (numerator, denominator))
        return ratio(above, below, self._prompts)

    def intervals(self, formulas: Callable[..., Mapping[str, Any]]) -> dict[str, Interval]:
        """Of formulas of the sums OF_TIMES; clusters are those of times."""
        return self._sums.intervals(formulas)

    @cached_property
    def _sums(self) -> Sums:
        return Sums.of_columns({name: self.columns[name] for name in OF_TIMES}, self._clusters)

    def _sum(self, names: Names) -> list[float]:
        chosen = [names] if isinstance(names, str) else names
        nothing = np.zeros(len(self._prompts))
        total: Floats = sum((self.columns.get(name, nothing) for name in chosen), nothing)
        return [float(value) for value in total]


def geometric_mean(s: Mapping[str, Any]) -> dict[str, Any]:
    """The geometric mean of the speedup of each request."""
    return {"geometric_mean": np.exp(s["log_speedup"] / s["requests"])}


def user_rates(s: Mapping[str, Any]) -> dict[str, Any]:
    """Tokens per second of one row: a row waits for the whole of each call that it is in."""
    return {
        "user_tokens_per_second": s["tokens"] / s["call_seconds"],
        "baseline_user_tokens_per_second": s["plain_tokens"] / s["plain_call_seconds"],
    }


def geometric_speedup(source: Source) -> GeometricMean:
    """The geometric mean of the speedup of each request, with its interval."""
    value = float(geometric_mean(source.point)["geometric_mean"])
    return GeometricMean(value, source.intervals(geometric_mean)["geometric_mean"])


def category_numbers(source: Source) -> CategoryNumbers:
    """The numbers of the requests in these sums."""
    s = source.point

    def formulas(s: Mapping[str, Any]) -> dict[str, Any]:
        return {"measured": speedup_of(s), **end_to_end(s)}

    speeds, ci95 = formulas(s), source.intervals(formulas)
    found = rates(s)
    return CategoryNumbers(
        prompts=round(s["requests"]),
        tokens=round(s["tokens"]),
        rounds=round(s["rounds"]),
        block_efficiency=source.estimate("tokens", "rounds"),
        alpha=source.estimate("beta", "tested"),
        speedup=SpeedupOfSome(
            measured=float(speeds["measured"]),
            ci95=ci95["measured"],
            end_to_end=float(speeds["end_to_end"]),
            end_to_end_ci95=ci95["end_to_end"],
            geometric_mean=geometric_speedup(source),
        ),
        tokens_per_second=float(found["speculative_tokens_per_second"]),
        baseline_tokens_per_second=float(found["baseline_tokens_per_second"]),
    )


def by_category(sums: PerRequestSums) -> dict[str, CategoryNumbers]:
    """The numbers of each category of one process, if the data name categories."""
    return {
        name: category_numbers(BootstrapSums(only(sums, [i for i, own in enumerate(sums.categories) if own == name])))
        for name in sorted({*sums.categories} - {""})
    }


def acceptance_of(source: Source, with_beta: bool) -> Acceptance:
    """Which guesses are accepted. `with_beta`: whether the verifier accepts with probability beta."""
    s = source.point
    lengths, drafts = _counted(s, ACCEPTED_OF), _counted(s, DRAFTS)
    places = range(len(_counted(s, TESTED_AT)))
    return Acceptance(
        lengths=[round(s.get(f"{ACCEPTED_OF}{n}", 0)) for n in range(max(lengths, default=0) + 1)],
        conditional=[
            source.estimate(_from(ACCEPTED_OF, lengths, place + 1), f"{TESTED_AT}{place}") for place in places
        ],
        joint=[
            source.estimate(_from(ACCEPTED_OF, lengths, n), _from(DRAFTS, drafts, n))
            for n in range(1, max(drafts, default=0) + 1)
        ],
        by_entropy={model: bins for model in MODELS if (bins := _entropies(source, model))},
        by_token_class={
            name: source.estimate(f"{ACCEPTED_CLASS}{name}", f"{TESTED_CLASS}{name}")
            for name in CLASSES
            if s.get(f"{TESTED_CLASS}{name}")
        },
        calibration=_calibration(source),
        check=acceptance_check(s) if with_beta else None,
    )


def acceptance_check(s: Mapping[str, Any]) -> AcceptanceCheck | None:
    """A sum of martingale differences: given all before it, a tested guess is accepted with probability beta. None if
    so little is left to chance that their sum is far from a normal."""
    accepted, expected, variance = (float(s[name]) for name in ("accepted", "beta", "beta_variance"))
    if not (variance >= LEAST_VARIANCE and math.isfinite(expected)):
        return None
    sd = math.sqrt(variance)
    return AcceptanceCheck((accepted - expected) / sd, round(accepted), expected, sd)


def by_rows(source: Source) -> list[RowsRate]:
    """Rates by the rows that a call served; empty if no call served several."""
    s = source.point
    name = "tokens rows "
    upto = sorted({*_counted(s, name), *_counted(s, f"{WAYS[1]}{name}")})
    if max(upto, default=1) == 1:
        return []
    return [RowsRate(most // 2 + 1, most, *(_rate(s, way, most) for way in WAYS)) for most in upto]


def _rate(s: Mapping[str, Any], way: str, most: int) -> Rate | None:
    tokens = s.get(f"{way}tokens rows {most}")
    if not tokens:
        return None
    shared, whole = (float(s[f"{way}{name} rows {most}"]) for name in ("seconds", "call_seconds"))
    return Rate(round(tokens), float(tokens) / shared, float(tokens) / whole)


def _entropies(source: Source, model: str) -> list[EntropyBin]:
    """The bins in which something was tested."""
    highs = [*ENTROPY_EDGES[1:], None]
    return [
        EntropyBin(
            low,
            high,
            source.estimate(f"beta {model} entropy {number}", f"tested {model} entropy {number}"),
            source.estimate(f"accepted {model} entropy {number}", f"tested {model} entropy {number}"),
        )
        for number, (low, high) in enumerate(zip(ENTROPY_EDGES, highs, strict=True))
        if source.point.get(f"tested {model} entropy {number}")
    ]


def _calibration(source: Source) -> DrafterCalibration | None:
    s = source.point
    table = np.array([[s.get(f"{name} confidence {number}", 0.0) for number in range(CONFIDENCE_BINS)]
                      for name in ("positions", "sum", "agreement")])  # fmt: skip
    total, *sums = table.sum(1)
    if not total:
        return None
    bins = []
    for number, (positions, *both) in enumerate(table.T):
        tested = source.estimate(f"accepted confidence {number}", f"tested confidence {number}")
        if positions or tested.n:
            confidence, agreement = (float(value / positions) if positions else None for value in both)
            low, high = number / CONFIDENCE_BINS, (number + 1) / CONFIDENCE_BINS
            bins.append(ConfidenceBin(low, high, round(positions), confidence, agreement, tested))
    confidence, agreement = (float(value / total) for value in sums)
    if not math.isfinite(confidence + agreement):
        return None
    return DrafterCalibration(calibration_error(*table), confidence, agreement, round(total), bins)


def _counted(s: Mapping[str, Any], prefix: str) -> list[int]:
    """The numbers at the ends of names that begin so and whose sums are not 0, in order."""
    return sorted(int(name.removeprefix(prefix)) for name, value in s.items() if name.startswith(prefix) and value)


def _from(prefix: str, numbers: Sequence[int], least: int) -> list[str]:
    """The names of the sums with at least this number."""
    return [f"{prefix}{number}" for number in numbers if number >= least]
