"""Compares runs on the requests that all of them decoded, by a paired bootstrap: ratios, a test of each pair, ranks."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import numpy as np

from specbench.errors import ConfigError
from specbench.stats.bootstrap import BootstrapSums, student_tail
from specbench.stats.estimates import Floats, Interval
from specbench.stats.formulas import OF_ALPHA, OF_STEPS, Sums, cost_ratios, rates, round_costs, speedup_of
from specbench.stats.records import PerRequestSums
from specbench.stats.two_way_bootstrap import places
from specbench.theory import expected_tokens

LEVEL = 0.05  # of all tests of one comparison together
OF_TEXT = {"alpha": "text_tested"}  # what `Compared.alpha_difference` counts
TOKENS_PER_SECOND, SPEEDUP = "tokens_per_second", "speedup"
FORMULAS: dict[str, Callable[[Sums], Any]] = {  # of what runs are ranked by
    TOKENS_PER_SECOND: lambda s: rates(s)["speculative_tokens_per_second"],
    SPEEDUP: speedup_of,
}


@dataclass
class Compared:
    """One run among those compared. `ratio` and `causes` are against the reference, whose own are 1."""

    label: str
    rank: int  # 1 + the number of runs that are significantly faster
    numbers: dict[str, float | None]  # of the shared requests
    ci95: dict[str, Interval]
    ratio: float  # of what is ranked
    ratio_ci95: Interval
    p_value: float | None  # of no difference from the reference, corrected for the number of pairs; None: too few
    alpha_difference: float | None  # of alpha along plain decoding's text
    alpha_difference_ci95: Interval
    causes: dict[str, float]  # factors of the ratio
    causes_ci95: dict[str, Interval]


@dataclass
class Pair:
    """Two runs, the first over the second."""

    first: str
    second: str
    ratio: float
    ci95: Interval
    p_value: float | None
    corrected: float | None  # p_value by Holm's method, which holds for all pairs together


@dataclass
class Comparison:
    """Runs on the requests that they share. `by` is what is ranked: `tokens_per_second` of runs that were decoded in
    turn, `speedup` of others, between which the machine may have changed."""

    by: str
    requests: int
    clusters: int
    reference: str
    runs: list[Compared]  # fastest first
    pairs: list[Pair] = field(default_factory=list)
    unlike: str = ""  # why the runs are not ranked; there are no tests then


def compare(runs: Mapping[str, PerRequestSums], by: str, reference: str | None = None, unlike: str = "") -> Comparison:
    """Compares runs by name; the reference is the fastest unless given. Runs of several processes are not tested, since
    how processes differ is no part of this interval, nor are those that are `unlike`. Raises ConfigError if the runs
    share no request."""
    known = set.intersection(*({*run.requests} for run in runs.values()))
    shared = [request for request in next(iter(runs.values())).requests if request in known]
    if not shared:
        raise ConfigError(f"{' and '.join(runs)} share no request: runs are compared on the same prompts")
    clusters = joined_clusters(runs, shared)
    sums = {label: BootstrapSums(columns_of_requests(run, shared), clusters) for label, run in runs.items()}
    order = sorted(sums, key=lambda label: -float(FORMULAS[by](sums[label].point)))
    pairs = holm([_pair(a, b, sums, by) for a, b in combinations(order, 2)])
    if unlike or any(len({*run.processes}) > 1 for run in runs.values()):
        pairs = [replace(pair, p_value=None, corrected=None) for pair in pairs]
    base = reference or order[0]
    found = [_compared(label, base, sums, by, pairs) for label in order]
    return Comparison(by, len(shared), len({*clusters}), base, found, pairs, unlike)


def columns_of_requests(run: PerRequestSums, requests: Sequence[str]) -> dict[str, Floats]:
    """The sums of these requests, by name; of a run of several processes over all of them."""
    place = {request: number for number, request in enumerate(requests)}
    where = np.array([place.get(request, len(requests)) for request in run.requests])
    sums = {name: np.bincount(where, values, len(requests) + 1)[:-1] for name, values in run.columns.items()}
    return {name: values.astype(float) for name, values in sums.items()}


def joined_clusters(runs: Mapping[str, PerRequestSums], requests: Sequence[str]) -> list[Hashable]:
    """Clusters of requests that belong together in any of the runs."""
    parent = {request: request for request in requests}

    def root(request: str) -> str:
        while parent[request] != request:
            parent[request] = request = parent[parent[request]]
        return request

    for run in runs.values():
        first: dict[Hashable, str] = {}
        _, cluster_of = places(run.by_process())
        for request, prompt in zip(run.requests, run.prompts, strict=True):
            if request in parent:
                parent[root(request)] = root(first.setdefault(cluster_of[prompt], request))
    return [root(request) for request in requests]


def holm(pairs: list[Pair]) -> list[Pair]:
    """Holm's method: the k-th smallest of m p-values is multiplied by m - k + 1, and none is below one before it."""
    known = sorted((pair for pair in pairs if pair.p_value is not None), key=lambda pair: pair.p_value or 0.0)
    lowest = 0.0
    for number, pair in enumerate(known):
        lowest = max(lowest, min(1.0, (pair.p_value or 0.0) * (len(known) - number)))
        pair.corrected = lowest
    return pairs


def beats(pair: Pair, label: str) -> bool:
    """Whether the other run of the pair is significantly faster than this one."""
    if pair.corrected is None or pair.corrected >= LEVEL or pair.ratio == 1:
        return False
    return label == (pair.second if pair.ratio > 1 else pair.first)


def speedup_causes(a: Sums, b: Sums) -> dict[str, Any]:
    """The factors of a's speedup over b's, from sums over the same requests. Times of a round are split by their
    logarithmic mean, so that the factors' product is exact whichever run is named first."""
    parts = [round_costs(s) for s in (a, b)]
    alphas = [np.minimum(s["beta"] / np.maximum(s["tested"], 1), 1 - 1e-12) for s in (a, b)]  # 0 if nothing was tested
    gammas = [s["drafted"] / s["rounds"] for s in (a, b)]
    of_alpha = np.sqrt(np.prod([expected_tokens(alphas[0], g) / expected_tokens(alphas[1], g) for g in gammas], 0))
    of_gamma = np.sqrt(np.prod([expected_tokens(x, gammas[0]) / expected_tokens(x, gammas[1]) for x in alphas], 0))
    tokens = (a["tokens"] / a["rounds"]) / (b["tokens"] / b["rounds"])
    mean = _logarithmic_mean(*(sum(p.values()) for p in parts))
    others = [s["plain_seconds"] / s["plain_step_seconds"] * (s["rounds"] / s["calls"]) for s in (a, b)]
    rows = [s["plain_tokens"] / s["plain_calls"] for s in (a, b)]
    return {
        "alpha": of_alpha,
        "gamma": of_gamma,
        "other_tokens": tokens / of_alpha / of_gamma,
        **{name: np.exp((parts[1][name] - parts[0][name]) / mean) for name in parts[0]},
        "plain_rest": (others[0] / rows[0]) / (others[1] / rows[1]),
    }


def _logarithmic_mean(x: Any, y: Any) -> Any:
    """(x - y) / (log x - log y), which is x where both are equal."""
    ratio = np.log(x / y)
    small = np.abs(ratio) < 1e-9
    return np.where(small, x, (x - y) / np.where(small, 1, ratio))


def _share(s: Sums, numerator: str, denominator: str) -> Any:
    """A ratio of two sums; not a number where there is nothing to share."""
    return s[numerator] / np.where(s[denominator] > 0, s[denominator], np.nan)


def _numbers(s: Sums) -> dict[str, Any]:
    found = {name: formula(s) for name, formula in FORMULAS.items()}
    found |= {
        "alpha": _share(s, "beta", "tested"),
        "alpha_on_target_text": _share(s, "text_beta", "text_tested"),  # Corollary 3.6
        "tau": s["tokens"] / s["rounds"],
    }
    return found | {name: value for name, value in cost_ratios(s).items() if name in ("c", "v", "o")}


def _pair(a: str, b: str, sums: Mapping[str, BootstrapSums], by: str) -> Pair:
    """The first over the second. Two runs with the same numbers differ with probability 1 by nothing."""
    ours, theirs, formula = sums[a], sums[b], FORMULAS[by]
    pair = Pair(a, b, *_ratio(ours, theirs, by), None, None)
    if ours.samples is not None and theirs.samples is not None:
        spread = ours.stderr(np.log(formula(ours.samples) / formula(theirs.samples)))
        deviation = abs(np.log(pair.ratio))
        if spread == 0:
            pair.p_value = float(deviation == 0)
        elif np.isfinite(spread):
            pair.p_value = student_tail(deviation / spread, ours.clusters - 1)
    return pair


def _ratio(a: BootstrapSums, b: BootstrapSums, by: str) -> tuple[float, Interval]:
    """The ratio of what runs are ranked by, and its interval."""
    formula = FORMULAS[by]
    return float(formula(a.point) / formula(b.point)), a.intervals(lambda s, t: {"": formula(s) / formula(t)}, b)[""]


def _compared(label: str, base: str, sums: Mapping[str, BootstrapSums], by: str, pairs: Sequence[Pair]) -> Compared:
    own, reference = sums[label], sums[base]

    def against(a: Sums, b: Sums) -> dict[str, Any]:
        plain = [rates(s)["baseline_tokens_per_second"] for s in (a, b)]
        return speedup_causes(a, b) | ({"plain": plain[0] / plain[1]} if by == TOKENS_PER_SECOND else {})

    def difference(a: Sums, b: Sums) -> dict[str, Any]:
        return {"alpha": _numbers(a)["alpha_on_target_text"] - _numbers(b)["alpha_on_target_text"]}

    with np.errstate(divide="ignore", invalid="ignore"):
        numbers = {name: float(value) for name, value in _numbers(own.point).items()}
        factors = {name: float(value) for name, value in against(own.point, reference.point).items()}
        alpha = float(difference(own.point, reference.point)["alpha"])
        ratio, ci95 = _ratio(own, reference, by)
    tests = [pair.corrected for pair in pairs if {pair.first, pair.second} == {label, base}]
    same = label == base
    return Compared(
        label=label,
        rank=1 + sum(beats(pair, label) for pair in pairs),
        numbers={name: value if np.isfinite(value) else None for name, value in numbers.items()},
        ci95=own.intervals(_numbers, counted=OF_STEPS),
        ratio=ratio,
        ratio_ci95=None if same else ci95,
        p_value=tests[0] if tests else None,
        alpha_difference=alpha if np.isfinite(alpha) and not same else None,
        alpha_difference_ci95=None if same else own.intervals(difference, reference, counted=OF_TEXT)["alpha"],
        causes={} if same else factors,
        causes_ci95={} if same else own.intervals(against, reference, counted=OF_ALPHA),
    )
