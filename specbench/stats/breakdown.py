"""The numbers of a run by category, place in the round, kind of token, entropy and rows, from sums over requests: those
of one process, or of several."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specbench.stats import estimates, formulas
from specbench.stats.formulas import ACCEPTED_OF, DRAFTS, TESTED_AT
from specbench.stats.metrics.calibration import calibration_error
from specbench.stats.request_sums import CLASSES, CONFIDENCE_BINS, ENTROPY_EDGES, WAYS
from specbench.stats.two_way_bootstrap import Estimator

CHECKED_VARIANCE = 9.0  # of the number of accepted guesses, for its distance to be measured by a normal


def speedup_of_some(source: Estimator) -> estimates.SpeedupOfSome:
    """The speedup of the requests in these sums, with its intervals."""
    value, ci95 = formulas.speedup_ratios(source.point), source.intervals(formulas.speedup_ratios)
    return estimates.SpeedupOfSome(
        measured=float(value["measured"]),
        ci95=ci95["measured"],
        end_to_end=float(value["end_to_end"]),
        end_to_end_ci95=ci95["end_to_end"],
        geometric_mean=estimates.GeometricMean(float(value["geometric_mean"]), ci95["geometric_mean"]),
    )


def category_numbers(source: Estimator) -> estimates.CategoryNumbers:
    """The numbers of the requests in these sums."""
    s = source.point
    ours, plain = formulas.rates(s).values()
    return estimates.CategoryNumbers(
        prompts=round(s["requests"]),
        tokens=round(s["tokens"]),
        rounds=round(s["rounds"]),
        block_efficiency=source.estimate("tokens", "rounds"),
        alpha=source.estimate("beta", "tested"),
        speedup=speedup_of_some(source),
        tokens_per_second=float(ours),
        baseline_tokens_per_second=float(plain),
        recited=recited_share(s),
    )


def recited_share(s: Mapping[str, Any]) -> float | None:
    """The share of new tokens that `request_sums.recited` counts; None of sums of an older version."""
    return float(s["recited"] / s["tokens"]) if "recited" in s else None


def acceptance_of(source: Estimator, with_beta: bool) -> estimates.Acceptance:
    """Which guesses are accepted. `with_beta`: whether the verifier accepts with probability beta."""
    s = source.point
    lengths, drafts = numbers_behind(s, ACCEPTED_OF), numbers_behind(s, DRAFTS)

    def accepted(least: int) -> list[str]:
        """The names of the rounds that accepted so many guesses, or more."""
        return [f"{ACCEPTED_OF}{number}" for number in lengths if number >= least]

    return estimates.Acceptance(
        lengths=[round(s.get(f"{ACCEPTED_OF}{n}", 0)) for n in range(max(lengths, default=0) + 1)],
        conditional=[
            source.estimate(accepted(place + 1), f"{TESTED_AT}{place}")
            for place in range(len(numbers_behind(s, TESTED_AT)))
        ],
        joint=[
            source.estimate(accepted(n), [f"{DRAFTS}{number}" for number in drafts if number >= n])
            for n in range(1, max(drafts, default=0) + 1)
        ],
        by_entropy={model: bins for model in ("drafter", "target") if (bins := _entropies(source, model))},
        by_token_class={
            name: source.estimate(f"accepted class {name}", f"tested class {name}")
            for name in CLASSES
            if s.get(f"tested class {name}")
        },
        calibration=_calibration(source),
        check=acceptance_check(s) if with_beta else None,
    )


def acceptance_check(s: Mapping[str, Any]) -> estimates.AcceptanceCheck | None:
    """A sum of martingale differences: given all before it, a tested guess is accepted with probability beta. None if
    so little is left to chance that their sum is far from a normal."""
    accepted, expected, variance = (float(s[name]) for name in ("accepted", "beta", "beta_variance"))
    if not (variance >= CHECKED_VARIANCE and math.isfinite(expected)):
        return None
    sd = math.sqrt(variance)
    return estimates.AcceptanceCheck((accepted - expected) / sd, round(accepted), expected, sd)


def by_rows(source: Estimator) -> list[estimates.RowsRate]:
    """Rates by the rows that a call served; empty if no call served several."""
    s = source.point
    upto = sorted({most for way in WAYS for most in numbers_behind(s, f"{way}tokens rows ")})
    if max(upto, default=1) == 1:
        return []
    return [estimates.RowsRate(most // 2 + 1, most, *(_rate(s, way, most) for way in WAYS)) for most in upto]


def _rate(s: Mapping[str, Any], way: str, most: int) -> estimates.Rate | None:
    tokens = s.get(f"{way}tokens rows {most}")
    if not tokens:
        return None
    shared, whole = (float(s[f"{way}{name} rows {most}"]) for name in ("seconds", "call_seconds"))
    return estimates.Rate(round(tokens), float(tokens) / shared, float(tokens) / whole)


def _entropies(source: Estimator, model: str) -> list[estimates.EntropyBin]:
    """The bins in which something was tested."""
    found = []
    for number, (low, high) in enumerate(zip(ENTROPY_EDGES, [*ENTROPY_EDGES[1:], None], strict=True)):
        name = f"{model} entropy {number}"
        if source.point.get(f"tested {name}"):
            alpha, accepted = (source.estimate(f"{what} {name}", f"tested {name}") for what in ("beta", "accepted"))
            found.append(estimates.EntropyBin(low, high, alpha, accepted))
    return found


def _calibration(source: Estimator) -> estimates.DrafterCalibration | None:
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
            bins.append(estimates.ConfidenceBin(low, high, round(positions), confidence, agreement, tested))
    confidence, agreement = (float(value / total) for value in sums)
    if not math.isfinite(confidence + agreement):
        return None
    return estimates.DrafterCalibration(calibration_error(*table), confidence, agreement, round(total), bins)


def numbers_behind(s: Mapping[str, Any], prefix: str) -> Sequence[int]:
    """The numbers at the ends of names that begin so and whose sums are not 0, in order."""
    return sorted(int(name.removeprefix(prefix)) for name, value in s.items() if name.startswith(prefix) and value)
