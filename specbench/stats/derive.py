"""Every number of results.json that sums over requests can give: of a run, of repeats, of workers, of some prompts.

What estimates them is `BootstrapSums` for one process and `TwoWaySums` for several on the same prompts.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from specbench import theory
from specbench.stats.bootstrap import BootstrapSums, Estimator
from specbench.stats.breakdown import acceptance_of, by_rows, category_numbers, geometric_speedup
from specbench.stats.estimates import (
    Acceptance,
    Bandwidth,
    CategoryNumbers,
    Cost,
    Counts,
    Estimate,
    Factor,
    Interval,
    RowsRate,
    Speedup,
    SpeedupOver,
)
from specbench.stats.formulas import (
    SECONDS_OF,
    TOKENS_OF,
    all_costs,
    bandwidths,
    cost_ratios,
    drifts,
    factors,
    measured_speedup,
    rates,
    speedups_over,
    user_rates,
    wall_speedup,
)
from specbench.stats.holdout_prediction import prediction
from specbench.stats.records import PerRequestSums
from specbench.stats.request_sums import BETA_AT, TESTED_AT

Load = Callable[[], Iterable[PerRequestSums]]  # the sums of each process, anew at each call
COUNTED = ("rounds", "tokens", "drafted", "tested", "accepted", "recovered", "bonus", "accepted_before_stop",
           "verified")  # fmt: skip


@dataclass(frozen=True)
class RunFacts:
    """What is known of a run beside its sums."""

    gamma: int | None = None  # of every round; None if a policy varies it
    by_beta: bool = False  # whether the verifier accepts a guess with probability beta
    peak: float = math.nan  # bytes per second that the memory was measured to read
    failed: int = 0  # requests
    too_long: int = 0


@dataclass(frozen=True)
class Derived:
    """The fields of `RunResult` that sums give: all, except what `cost` and `bandwidth` have from elsewhere. `drift`
    has total variation, KL and their intervals."""

    alpha: Estimate
    alpha_counted: Estimate
    alpha_on_target_text: Estimate
    beta_by_position: list[Estimate]
    alpha_by_category: dict[str, Estimate]
    draft_acceptance_rate: float | None
    block_efficiency: Estimate
    cost: Cost
    speedup: Speedup
    optimal_gamma: int | None
    throughput: dict[str, float]
    throughput_ci95: dict[str, Interval]
    throughput_by_rows: list[RowsRate]
    speedup_over: dict[str, SpeedupOver]
    bandwidth: Bandwidth
    recording: float | None
    drift: dict[str, Any]
    counts: Counts
    by_category: dict[str, CategoryNumbers]
    acceptance: Acceptance


def of_one_process(load: Load) -> BootstrapSums:
    """The estimator of a run of one process."""
    (sums,) = load()
    return BootstrapSums.of(sums)


def derive(load: Load, estimator: Callable[[Load], Estimator], facts: RunFacts) -> Derived:
    """Every number that the sums of a run's processes give. `estimator` is `of_one_process` or `TwoWaySums.of`."""
    with np.errstate(divide="ignore", invalid="ignore"):
        source = estimator(load)
        s, alpha, cost = source.point, source.estimate("beta", "tested"), _cost(source)
        categories = by_category(load, estimator)
        known = cost.c is not None and alpha.mean is not None and np.isfinite(alpha.mean)
        return Derived(
            alpha=alpha,
            alpha_counted=source.estimate("accepted", "tested"),
            alpha_on_target_text=source.estimate("text_beta", "text_tested", counted="text_tested"),
            beta_by_position=_by_place(source),
            alpha_by_category={name: found.alpha for name, found in categories.items()},
            draft_acceptance_rate=_known(s["accepted"] / s["drafted"]),
            block_efficiency=source.estimate("tokens", "rounds"),
            cost=cost,
            speedup=_speedup(source, facts.gamma, cost, alpha.mean if known else None),
            optimal_gamma=theory.optimal_gamma(alpha.mean or 0.0, cost.c or 0.0) if known else None,
            throughput=_floats(rates(s) | _peer_rates(s) | user_rates(s)),
            throughput_ci95=source.intervals(rates) | source.intervals(user_rates),
            throughput_by_rows=by_rows(source),
            speedup_over=_over(source),
            bandwidth=_bandwidth(source, facts.peak),
            recording=_known(s["record_seconds"] / s["seconds"]),
            drift={name: _known(value) for name, value in drifts(s).items()} | {"ci95": source.intervals(drifts)},
            counts=_counts(s, facts),
            by_category=categories,
            acceptance=acceptance_of(source, facts.by_beta),
        )


def by_category(load: Load, estimator: Callable[[Load], Estimator]) -> dict[str, CategoryNumbers]:
    """The numbers of each category of prompts, if the data name categories."""
    names = sorted({name for sums in load() for name in sums.categories} - {""})
    return {
        name: category_numbers(estimator(lambda name=name: (sums.of_category(name) for sums in load())))  # type: ignore[misc]
        for name in names
    }


def accounting(source: Estimator, gamma: int | None) -> dict[str, Factor]:
    """The factors of the measured speedup, each with its 95 % interval; empty if nothing was drafted, or if a
    probability is not finite. `gamma` is as for `factors`."""
    if not source.point["tested"] or not source.point["steps"]:
        return {}
    point = factors(source.point, gamma)
    if not np.isfinite([*point.values()]).all():
        return {}
    intervals = source.intervals(lambda s: factors(s, gamma))
    return {name: Factor(float(value), intervals[name]) for name, value in point.items()}


def _by_place(source: Estimator) -> list[Estimate]:
    """Mean beta (Definition 3.1) of the first, second, ... guess of a round, over the rounds in which it was tested."""
    places = sorted(int(name.removeprefix(TESTED_AT)) for name in source.point if name.startswith(TESTED_AT))
    return [source.estimate(f"{BETA_AT}{place}", f"{TESTED_AT}{place}") for place in places]


def _cost(source: Estimator) -> Cost:
    """c, v and o: means over all rounds, in steps of the baseline's single-token target calls."""
    known: dict[str, Any] = {name: _known(value) for name, value in all_costs(source.point).items()}
    return Cost(**known, by_gamma=[], ci95=source.intervals(cost_ratios))


def _speedup(source: Estimator, gamma: int | None, cost: Cost, alpha: float | None) -> Speedup:
    """The speedup, its predictions and its causes; `alpha` is None if it or c is not known."""
    s, value, ci95 = source.point, measured_speedup(source.point), source.intervals(measured_speedup)
    drafted = float(s["drafted"] / s["rounds"])
    theorem = corrected = None
    if alpha is not None and cost.c is not None:
        theorem = theory.walltime_improvement(alpha, drafted if gamma is None else gamma, cost.c)
    if cost.v is not None and cost.o is not None:
        rest = float(s["plain_seconds"] / s["plain_step_seconds"])
        efficiency = float(s["tokens"] / s["rounds"])
        corrected = rest * theory.corrected_improvement(efficiency, drafted, cost.c or 0.0, cost.v, cost.o)
    return Speedup(
        measured=float(value["measured"]),
        ci95=ci95["measured"],
        end_to_end=float(value["end_to_end"]),
        theorem_3_8=theorem,
        corrected=corrected,
        accounting=accounting(source, gamma),
        predicted=prediction(*source.units()),
        end_to_end_ci95=ci95["end_to_end"],
        geometric_mean=geometric_speedup(source),
        wall=float(wall_speedup(s)),
    )


def _peer_rates(s: Mapping[str, Any]) -> dict[str, Any]:
    """Tokens per second of each peer."""
    peers = [name.removeprefix(SECONDS_OF) for name in s if name.startswith(SECONDS_OF)]
    return {f"{name}_tokens_per_second": s[f"{TOKENS_OF}{name}"] / s[f"{SECONDS_OF}{name}"] for name in peers}


def _over(source: Estimator) -> dict[str, SpeedupOver]:
    """Ours over each peer."""
    ci95 = source.intervals(speedups_over)
    return {name: SpeedupOver(float(value), ci95[name]) for name, value in speedups_over(source.point).items()}


def _bandwidth(source: Estimator, peak: float) -> Bandwidth:
    """What one step has to read, weights and the keys and values of every row, over its time."""
    found = {name: _known(value) for name, value in bandwidths(source.point).items()}
    target = found["target_bytes_per_second"]
    return Bandwidth(
        target_bytes_per_second=target,
        drafter_bytes_per_second=found.get("drafter_bytes_per_second"),
        measured_peak_bytes_per_second=peak,
        target_share_of_peak=target / peak if target else None,
        ci95=source.intervals(bandwidths),
    )


def _counts(s: Mapping[str, Any], facts: RunFacts) -> Counts:
    """Raw counts over all finished requests."""
    return Counts(
        prompts=round(float(s["requests"])),
        **{name: round(float(s[name])) for name in COUNTED},
        baseline_tokens=round(float(s["plain_tokens"])),
        failed=facts.failed,
        too_long=facts.too_long,
    )


def _floats(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}


def _known(value: Any) -> float | None:
    """The number, if it is finite."""
    return float(value) if np.isfinite(value) else None
