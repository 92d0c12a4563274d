"""The numbers of a run by category, place in the round, kind of token, entropy and rows, from sums over requests: those
of one process, or of several."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specbench.stats.estimates import (
    Acceptance,
    AcceptanceCheck,
    CategoryNumbers,
    ConfidenceBin,
    DrafterCalibration,
    EntropyBin,
    GeometricMean,
    Rate,
    RowsRate,
    SpeedupOfSome,
)
from specbench.stats.formulas import DRAFTS, geometric_mean, measured_speedup, rates
from specbench.stats.metrics.calibration import calibration_error
from specbench.stats.request_sums import TESTED_AT
from specbench.stats.round_sums import (
    ACCEPTED_CLASS,
    ACCEPTED_OF,
    CLASSES,
    CONFIDENCE_BINS,
    ENTROPY_EDGES,
    MODELS,
    TESTED_CLASS,
    WAYS,
)
from specbench.stats.two_way_bootstrap import Estimator

CHECKED_VARIANCE = 9.0  # of the number of accepted guesses, for its distance to be measured by a normal


def geometric_speedup(source: Estimator) -> GeometricMean:
    """The geometric mean of the speedup of each request, with its interval."""
    value = float(geometric_mean(source.point)["geometric_mean"])
    return GeometricMean(value, source.intervals(geometric_mean)["geometric_mean"])


def speedup_of_some(source: Estimator) -> SpeedupOfSome:
    """The speedup of the requests in these sums, with its intervals."""
    value, ci95 = measured_speedup(source.point), source.intervals(measured_speedup)
    measured, end_to_end = (float(value[name]) for name in ("measured", "end_to_end"))
    return SpeedupOfSome(measured, ci95["measured"], end_to_end, ci95["end_to_end"], geometric_speedup(source))


def category_numbers(source: Estimator) -> CategoryNumbers:
    """The numbers of the requests in these sums."""
    s = source.point
    found = rates(s)
    return CategoryNumbers(
        prompts=round(s["requests"]),
        tokens=round(s["tokens"]),
        rounds=round(s["rounds"]),
        block_efficiency=source.estimate("tokens", "rounds"),
        alpha=source.estimate("beta", "tested"),
        speedup=speedup_of_some(source),
        tokens_per_second=float(found["speculative_tokens_per_second"]),
        baseline_tokens_per_second=float(found["baseline_tokens_per_second"]),
    )


def acceptance_of(source: Estimator, with_beta: bool) -> Acceptance:
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
    if not (variance >= CHECKED_VARIANCE and math.isfinite(expected)):
        return None
    sd = math.sqrt(variance)
    return AcceptanceCheck((accepted - expected) / sd, round(accepted), expected, sd)


def by_rows(source: Estimator) -> list[RowsRate]:
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


def _entropies(source: Estimator, model: str) -> list[EntropyBin]:
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


def _calibration(source: Estimator) -> DrafterCalibration | None:
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
