"""Compares runs on the requests that all of them decoded, by a paired bootstrap: ratios, a test of each pair, ranks."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import numpy as np

from specbench.errors import ConfigError
from specbench.stats.bootstrap import BootstrapSums, student_tail
from specbench.stats.estimates import Floats, Interval
from specbench.stats.formulas import cost_ratios, drafting_of, rates, speedup_of
from specbench.stats.records import PerRequestSums
from specbench.theory import expected_tokens

LEVEL = 0.05  # of all tests of one comparison together
TOKENS_PER_SECOND, SPEEDUP = "tokens_per_second", "speedup"
PLAIN_RATE = "baseline_tokens_per_second"
SumFormula = Callable[[Mapping[str, Any]], Any]


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


def compare(runs: Mapping[str, PerRequestSums], by: str, reference: str | None = None) -> Comparison:
    """Compares runs by name; the reference is the fastest unless given. Runs of several processes are not tested, since
    how processes differ is no part of this interval. Raises ConfigError if the runs share no request."""
    known = set.intersection(*({*run.requests} for run in runs.values()))
    shared = [request for request in next(iter(runs.values())).requests if request in known]
    if not shared:
        raise ConfigError(f"{' and '.join(runs)} share no request: runs are compared on the same prompts")
    clusters = joined_clusters(runs, shared)
    sums = {label: BootstrapSums(columns_of(run, shared), clusters) for label, run in runs.items()}
    ranked = FORMULAS[by]
    values = {label: float(ranked(s.point)) for label, s in sums.items()}
    order = sorted(sums, key=lambda label: -values[label])
    base = reference or order[0]
    pairs = holm([_pair(a, b, sums, ranked) for a, b in combinations(order, 2)])
    if any(len({*run.processes}) > 1 for run in runs.values()):
        pairs = [replace(pair, p_value=None, corrected=None) for pair in pairs]
    slower = {label: sum(beats(pair, label) for pair in pairs) for label in order}
    found = [_compared(label, base, sums, by, 1 + slower[label], pairs) for label in order]
    return Comparison(by, len(shared), len({*clusters}), base, found, pairs)


def columns_of(run: PerRequestSums, requests: Sequence[str]) -> dict[str, Floats]:
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
        for request, belongs in zip(run.requests, _belongings(run), strict=True):
            if request in parent:
                for group in belongs:
                    parent[root(request)] = root(first.setdefault(group, request))
    return [root(request) for request in requests]


def _belongings(run: PerRequestSums) -> list[tuple[Hashable, ...]]:
    """What each request of a run shares with others: its prompt and its cluster. Several processes have requests in
    common; where they put other rows together, as in another order, only prompts count."""
    clusters: dict[int, dict[int, list[str]]] = {}
    processes = run.processes or [0] * len(run.requests)
    for process, cluster, request in zip(processes, run.clusters, run.requests, strict=True):
        clusters.setdefault(process, {}).setdefault(cluster, []).append(request)
    apart = [{frozenset(group) for group in each.values()} for each in clusters.values()]
    alike = all(groups == apart[0] for groups in apart)
    return [
        (("prompt", prompt), ("cluster", frozenset(clusters[process][cluster]))) if alike else (("prompt", prompt),)
        for prompt, process, cluster in zip(run.prompts, processes, run.clusters, strict=True)
    ]


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


def causes(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """The factors of a's speedup over b's, from sums over the same requests. Times of a round are split by their
    logarithmic mean, so that the factors' product is exact whichever run is named first."""
    costs = [cost_ratios(s) for s in (a, b)]  # a round is drafting, verifying and the rest
    parts = [{"c": drafting_of(s), "v": cost["v"], "o": cost["o"]} for s, cost in zip((a, b), costs, strict=True)]
    alphas = [np.minimum(s["beta"] / np.maximum(s["tested"], 1), 1 - 1e-12) for s in (a, b)]  # 0 if nothing was tested
    gammas = [s["drafted"] / s["rounds"] for s in (a, b)]
    of_alpha = np.sqrt(np.prod([expected_tokens(alphas[0], g) / expected_tokens(alphas[1], g) for g in gammas], 0))
    of_gamma = np.sqrt(np.prod([expected_tokens(x, gammas[0]) / expected_tokens(x, gammas[1]) for x in alphas], 0))
    tokens = (a["tokens"] / a["rounds"]) / (b["tokens"] / b["rounds"])
    mean = _logarithmic_mean(*(sum(p.values()) for p in parts))
    found = {"alpha": of_alpha, "gamma": of_gamma, "other_tokens": tokens / of_alpha / of_gamma}
    found |= {name: np.exp((parts[1][name] - parts[0][name]) / mean) for name in parts[0]}
    others = [s["plain_seconds"] / s["plain_step_seconds"] * (s["rounds"] / s["calls"]) for s in (a, b)]
    rows = [s["plain_tokens"] / s["plain_calls"] for s in (a, b)]
    return found | {"plain_rest": (others[0] / rows[0]) / (others[1] / rows[1])}


def _logarithmic_mean(x: Any, y: Any) -> Any:
    """(x - y) / (log x - log y), which is x where both are equal."""
    ratio = np.log(x / y)
    small = np.abs(ratio) < 1e-9
    return np.where(small, x, (x - y) / np.where(small, 1, ratio))


def text_alpha(s: Mapping[str, Any]) -> Any:
    """Corollary 3.6: mean beta along plain decoding's text; nan where it was not read."""
    return s["text_beta"] / np.where(s["text_tested"] > 0, s["text_tested"], np.nan)


FORMULAS: dict[str, SumFormula] = {
    TOKENS_PER_SECOND: lambda s: rates(s)["speculative_tokens_per_second"],
    SPEEDUP: speedup_of,
}


def _numbers(s: Mapping[str, Any]) -> dict[str, Any]:
    tested = np.where(s["tested"] > 0, s["tested"], np.nan)
    found = {name: formula(s) for name, formula in FORMULAS.items()}
    found |= {"alpha": s["beta"] / tested, "alpha_on_target_text": text_alpha(s), "tau": s["tokens"] / s["rounds"]}
    return found | {name: value for name, value in cost_ratios(s).items() if name in ("c", "v", "o")}


def _pair(a: str, b: str, sums: Mapping[str, BootstrapSums], formula: SumFormula) -> Pair:
    """The first over the second. Two runs with the same numbers differ with probability 1 by nothing."""
    ratio, ci95, spread = _ratio(sums[a], sums[b], formula)
    if spread is None or not np.isfinite(spread):
        return Pair(a, b, ratio, ci95, None, None)
    deviation = abs(np.log(ratio))
    p_value = float(deviation == 0) if spread == 0 else student_tail(deviation / spread, sums[a].clusters - 1)
    return Pair(a, b, ratio, ci95, p_value, None)


def _ratio(a: BootstrapSums, b: BootstrapSums, formula: SumFormula) -> tuple[float, Interval, float | None]:
    """The ratio of a formula, its interval and the standard error of its logarithm."""
    point = float(formula(a.point) / formula(b.point))
    if a.samples is None or b.samples is None:
        return point, None, None
    interval = a.intervals(lambda s, t: {"ratio": formula(s) / formula(t)}, b)["ratio"]
    return point, interval, a.stderr(np.log(formula(a.samples) / formula(b.samples)))


def _compared(
    label: str, base: str, sums: Mapping[str, BootstrapSums], by: str, rank: int, pairs: Sequence[Pair]
) -> Compared:
    own, reference = sums[label], sums[base]

    def against(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
        found = causes(a, b)
        return found | {"plain": rates(a)[PLAIN_RATE] / rates(b)[PLAIN_RATE]} if by == TOKENS_PER_SECOND else found

    def difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
        return {"alpha": text_alpha(a) - text_alpha(b)}

    with np.errstate(divide="ignore", invalid="ignore"):
        numbers = {name: float(value) for name, value in _numbers(own.point).items()}
        ratio, ci95, _ = _ratio(own, reference, FORMULAS[by])
        factors = {name: float(value) for name, value in against(own.point, reference.point).items()}
        alpha = float(difference(own.point, reference.point)["alpha"])
    tests = [pair.corrected for pair in pairs if {pair.first, pair.second} == {label, base}]
    same = label == base
    return Compared(
        label=label,
        rank=rank,
        numbers={name: value if np.isfinite(value) else None for name, value in numbers.items()},
        ci95=own.intervals(_numbers),
        ratio=ratio,
        ratio_ci95=None if same else ci95,
        p_value=tests[0] if tests else None,
        alpha_difference=alpha if np.isfinite(alpha) and not same else None,
        alpha_difference_ci95=None if same else own.intervals(difference, reference)["alpha"],
        causes={} if same else factors,
        causes_ci95={} if same else own.intervals(against, reference),
    )
