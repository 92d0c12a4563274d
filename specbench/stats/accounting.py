"""Splits the measured speedup into factors: Theorem 3.8's prediction, and one for each cause of the difference.

All of them are ratios of sums over requests, so that a bootstrap gives each an interval, and their product is the
measured speedup. Where rows decode together, a request has its even share of every call it was in.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specbench.decoding.timer import Lap
from specbench.results.schema import Factor
from specbench.stats.bootstrap import Sums
from specbench.stats.records import Result
from specbench.stats.two_way_bootstrap import TwoWaySums

DRAFTS = "drafts of "  # and a number of guesses: how many drafts had so many


def sums_of(results: Sequence[Result], by_beta: bool = True) -> list[dict[str, float]]:
    """The sums over each request that factors and costs are computed from; times in seconds. `by_beta` says whether the
    verifier accepts a guess with probability beta; if not, nothing is known of luck."""
    rows = [_sums(result, by_beta) for result in results]
    names = dict.fromkeys(name for row in rows for name in row)  # not every request has drafts of every length
    return [{name: row.get(name, 0) for name in names} for row in rows]


def accounting(sums: Sums | TwoWaySums, gamma: int | None) -> dict[str, Factor]:
    """The factors of the measured speedup, each with its 95 % interval; empty if nothing was drafted, or if a
    probability is not finite. `gamma` is None if a policy varies it; then the mean number of drafted tokens is used."""
    if not sums.point["tested"] or not sums.point["steps"]:
        return {}
    point = _factors(sums.point, gamma)
    if not np.isfinite([*point.values()]).all():
        return {}
    intervals = sums.intervals(lambda s: _factors(s, gamma))
    return {name: Factor(float(value), intervals[name]) for name, value in point.items()}


def speedup_of(s: Mapping[str, Any], tokens: str = "tokens") -> Any:
    """Seconds per token of plain decoding over ours, from sums over requests, if these had yielded as many tokens as
    the sum `tokens` says."""
    return (s["plain_seconds"] / s["plain_tokens"]) / (s["seconds"] / s[tokens])


def cost_ratios(s: Mapping[str, Any]) -> dict[str, Any]:
    """c, v and o, and the seconds of a single-token target step, from sums over requests."""
    step = s["plain_step_seconds"] / s["plain_calls"]
    rest = s["seconds"] - s["draft_seconds"] - s["verify_seconds"]
    return {
        "c": s["draft_seconds"] / np.where(s["steps"] > 0, s["steps"], np.nan) / step,
        "v": s["verify_seconds"] / s["calls"] / step,
        "o": rest / s["calls"] / step,
        "target_step_seconds": step,
    }


def drafting_of(s: Mapping[str, Any]) -> Any:
    """The drafting of a round, in target steps, from sums over requests."""
    return s["draft_seconds"] / s["calls"] / cost_ratios(s)["target_step_seconds"]


def _sums(result: Result, by_beta: bool) -> dict[str, float]:
    rounds, plain = [*result.speculative.rounds], [*result.baseline.rounds]
    tokens, accepted = len(result.speculative.tokens), sum(r.accepted for r in rounds)
    beta = sum(sum(r.beta) for r in rounds)
    found: dict[str, float] = {
        "beta": beta,
        "expected": tokens - accepted + (beta if by_beta else accepted),  # tokens, without the luck of the draws
        "stops": tokens < result.limit,
        "tested": sum(r.tested for r in rounds),
        "tokens": tokens,
        "rounds": len(rounds),
        "drafted": sum(r.gamma for r in rounds),
        "draft_seconds": sum(r.seconds[Lap.DRAFT] / r.rows for r in rounds),
        "steps": sum(r.steps / r.rows for r in rounds),
        "verify_seconds": sum(r.seconds[Lap.VERIFY] / r.rows for r in rounds),
        "calls": sum(1 / r.rows for r in rounds),
        "seconds": result.speculative.seconds,
        "plain_tokens": len(result.baseline.tokens),
        "plain_step_seconds": sum(r.seconds[Lap.VERIFY] / r.rows for r in plain),
        "plain_calls": sum(1 / r.rows for r in plain),
        "plain_seconds": result.baseline.seconds,
    }
    for r in rounds:
        name = f"{DRAFTS}{r.gamma}"
        found[name] = found.get(name, 0) + 1
    return found


def _factors(s: Mapping[str, Any], gamma: int | None) -> dict[str, Any]:
    """The factors by name, from sums over requests: numbers, or arrays [samples]. See docs/metrics.md."""
    g = s["drafted"] / s["rounds"] if gamma is None else gamma
    alpha = np.minimum(s["beta"] / s["tested"], 1 - 1e-12)  # equation 1 is continuous at 1
    cost = cost_ratios(s)
    drafting = drafting_of(s)
    whole = expected_tokens(alpha, g)
    lengths = {name: int(name.removeprefix(DRAFTS)) for name in s if name.startswith(DRAFTS)}
    actual = sum(s[name] * expected_tokens(alpha, guesses) for name, guesses in lengths.items())
    going_on = alpha * (1 - s["stops"] / s["tokens"])  # an accepted guess that does not end the text
    stopped = sum(s[name] * expected_tokens(going_on, guesses) for name, guesses in lengths.items())
    rows, plain_rows = s["rounds"] / s["calls"], s["plain_tokens"] / s["plain_calls"]
    return {
        "theorem_3_8": whole / (g * cost["c"] + 1),
        "short_drafts": actual / s["rounds"] / whole,
        "stops": stopped / actual,
        "dependence": s["expected"] / stopped,
        "luck": s["tokens"] / s["expected"],
        "drafting": (g * cost["c"] + 1) / (drafting + 1),
        "verify": (drafting + 1) / (drafting + cost["v"]),
        "rest": (drafting + cost["v"]) / (drafting + cost["v"] + cost["o"]),
        "plain_rest": s["plain_seconds"] / s["plain_step_seconds"],
        "rows": rows / plain_rows,
    }


def expected_tokens(alpha: Any, gamma: Any) -> Any:
    """Equation 1: expected tokens of a round of gamma guesses, if betas are i.i.d. with mean alpha below 1."""
    return (1 - alpha ** (gamma + 1)) / (1 - alpha)
