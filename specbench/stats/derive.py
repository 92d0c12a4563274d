"""Every number of results.json that sums over requests can give: of a run, of repeats, of workers, of some prompts."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import numpy as np

from specbench import theory
from specbench.stats import formulas
from specbench.stats.bootstrap import BootstrapSums
from specbench.stats.breakdown import (
    acceptance_of,
    by_rows,
    category_numbers,
    numbers_behind,
    recited_share,
    speedup_of_some,
)
from specbench.stats.estimates import (
    Bandwidth,
    CategoryNumbers,
    Cost,
    Counts,
    Derived,
    Factor,
    Speedup,
    SpeedupOver,
)
from specbench.stats.formulas import OF_ALPHA, OF_STEPS
from specbench.stats.records import PerRequestSums
from specbench.stats.two_way_bootstrap import Estimator, TwoWaySums

LENGTHS = (128, 512, 2048, 8192)  # tokens of a prompt, between which requests are told apart
LoadSums = Callable[[], Iterable[PerRequestSums]]  # the sums of each process, anew at each call


@dataclass(frozen=True)
class RunFacts:
    """What is known of a run beside its sums."""

    gamma: int | None = None  # of every round; None if a policy varies it
    by_beta: bool = False  # whether the verifier accepts a guess with probability beta
    peak: float = math.nan  # bytes per second that the memory was measured to read
    failed: int = 0  # requests
    too_long: int = 0


def of_one_process(load: LoadSums) -> BootstrapSums:
    """The estimator of a run of one process."""
    (sums,) = load()
    return BootstrapSums.of(sums)


def derive(load: LoadSums, estimator: Callable[[LoadSums], Estimator], facts: RunFacts) -> Derived:
    """Every number that the sums of a run's processes give. `estimator` is `of_one_process` or `TwoWaySums.of`."""
    with np.errstate(divide="ignore", invalid="ignore"):
        source = estimator(load)
        s, alpha = source.point, source.estimate("beta", "tested")
        cost = Cost(
            **_known(formulas.all_costs(s)), by_gamma=[], ci95=source.intervals(formulas.cost_ratios, counted=OF_STEPS)
        )
        categories = by_category(load, estimator)
        peers = {f"{name}_tokens_per_second": rate for name, rate in formulas.peer_rates(s).items()}
        throughput, over = formulas.rates(s) | peers | formulas.user_rates(s), source.intervals(formulas.speedups_over)
        known = cost.c is not None and alpha.mean is not None and np.isfinite(alpha.mean)
        shares = _known({"drafted": s["accepted"] / s["drafted"], "recording": s["record_seconds"] / s["seconds"]})
        return Derived(
            alpha=alpha,
            alpha_counted=source.estimate("accepted", "tested"),
            alpha_on_target_text=source.estimate("text_beta", "text_tested", counted="text_tested"),
            beta_by_position=[
                source.estimate(f"{formulas.BETA_AT}{place}", f"{formulas.TESTED_AT}{place}")
                for place in numbers_behind(s, formulas.TESTED_AT)
            ],
            alpha_by_category={name: found.alpha for name, found in categories.items()},
            draft_acceptance_rate=shares["drafted"],
            block_efficiency=source.estimate("tokens", "rounds"),
            cost=cost,
            speedup=_speedup(source, facts.gamma, cost),
            optimal_gamma=theory.optimal_gamma(alpha.mean or 0.0, cost.c or 0.0) if known else None,
            throughput={name: float(rate) for name, rate in throughput.items()},
            throughput_ci95=source.intervals(lambda s: formulas.rates(s) | formulas.user_rates(s)),
            throughput_by_rows=by_rows(source),
            speedup_over={n: SpeedupOver(float(x), over[n]) for n, x in formulas.speedups_over(s).items()},
            bandwidth=_bandwidth(source, facts.peak),
            recording=shares["recording"],
            drift=_known(formulas.drifts(s)) | {"ci95": source.intervals(formulas.drifts)},
            counts=_counts(s, facts),
            by_category=categories,
            by_length=by_length(load, estimator),
            acceptance=acceptance_of(source, facts.by_beta),
            block_efficiency_of_requests=(
                source.estimate("tokens_per_round", "requests") if "tokens_per_round" in s else None
            ),
            recited=recited_share(s),
        )


def by_category(load: LoadSums, estimator: Callable[[LoadSums], Estimator]) -> dict[str, CategoryNumbers]:
    """The numbers of each category of prompts, if the data name categories."""
    names = sorted({name for sums in load() for name in sums.categories} - {""})
    return {name: numbers_of(load, estimator, lambda sums: sums.categories, name) for name in names}


def by_length(load: LoadSums, estimator: Callable[[LoadSums], Estimator]) -> dict[str, CategoryNumbers]:
    """The numbers of the requests whose prompts have so many tokens, if not all lie between the same of LENGTHS."""

    def classes(sums: PerRequestSums) -> Sequence[int]:
        lengths = sums.columns.get("prompt_tokens", np.zeros(0))  # sums of an older version have none
        return [*map(int, np.searchsorted(LENGTHS, lengths, side="right"))]

    found, starts = sorted({number for sums in load() for number in classes(sums)}), (1, *LENGTHS)
    names = [f"{start} to {end - 1}" for start, end in zip(starts, LENGTHS, strict=False)] + [f"{LENGTHS[-1]} or more"]
    return {names[i]: numbers_of(load, estimator, classes, i) for i in found} if len(found) > 1 else {}


def numbers_of(
    load: LoadSums, estimator: Callable[[LoadSums], Estimator], classes: Callable[[PerRequestSums], Sequence[Any]],
    wanted: Any,
) -> CategoryNumbers:  # fmt: skip
    """The numbers of the requests of one class; `classes` gives the class of each request."""

    def own() -> Iterable[PerRequestSums]:
        return (sums.only([i for i, of in enumerate(classes(sums)) if of == wanted]) for sums in load())

    return category_numbers(estimator(own))


def accounting(source: Estimator, gamma: int | None) -> dict[str, Factor]:
    """The factors of the measured speedup, each with its 95 % interval; empty if nothing was drafted, or if a
    probability is not finite. `gamma` is as for `factors`."""
    if not source.point["tested"] or not source.point["steps"]:
        return {}
    point = formulas.factors(source.point, gamma)
    if not np.isfinite([*point.values()]).all():
        return {}
    intervals = source.intervals(partial(formulas.factors, gamma=gamma), counted=OF_ALPHA | OF_STEPS)
    return {name: Factor(float(value), intervals[name]) for name, value in point.items()}


def _speedup(source: Estimator, gamma: int | None, cost: Cost) -> Speedup:
    """The speedup, its predictions and its causes."""
    found, causes, s = speedup_of_some(source), accounting(source, gamma), source.point
    g = float(s["drafted"] / s["rounds"]) if gamma is None else gamma
    return Speedup(
        **vars(found),
        theorem_3_8=causes["theorem_3_8"].factor if causes else None,
        corrected=None
        if cost.v is None or cost.o is None
        else theory.corrected_improvement(float(s["tokens"] / s["rounds"]), g, cost.c or 0.0, cost.v, cost.o),
        accounting=causes,
        wall=float(formulas.wall_speedup(source.point)),
        clusters=source.clusters,
        process_share=source.process_share(formulas.speedup_of) if isinstance(source, TwoWaySums) else None,
    )


def _bandwidth(source: Estimator, peak: float) -> Bandwidth:
    found = _known(formulas.bandwidths(source.point))
    target = found["target_bytes_per_second"]
    return Bandwidth(
        target_bytes_per_second=target,
        drafter_bytes_per_second=found.get("drafter_bytes_per_second"),
        measured_peak_bytes_per_second=peak,
        target_share_of_peak=target / peak if target else None,
        ci95=source.intervals(formulas.bandwidths, counted=OF_STEPS),
    )


def _counts(s: Mapping[str, Any], facts: RunFacts) -> Counts:
    """Raw counts over all finished requests: a field of `Counts` is the sum of its name, but for four."""
    return Counts(
        prompts=round(s["requests"]),
        baseline_tokens=round(s["plain_tokens"]),
        failed=facts.failed,
        too_long=facts.too_long,
        **{each.name: round(s[each.name]) for each in fields(Counts) if each.name in s},
    )


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers; None where one is not finite."""
    return {name: float(value) if np.isfinite(value) else None for name, value in values.items()}
