"""The numbers of one server in several processes on the same prompts."""

from collections.abc import Mapping, Sequence
from statistics import harmonic_mean
from typing import Any

from specbench.contrib.servers.numbers import sum_of_known
from specbench.run.pooled import means

Tree = dict[str, Any]


def pooled_server(found: Sequence[Mapping[str, Any]]) -> Tree:
    """`ServerNumbers` of all processes, as they stand in results.json: counts are summed, and ratios are those of the
    sums. Their standard errors are not known from sums over processes that share prompts. Tokens per second are the
    processes' harmonic mean: all tokens over all seconds where every process received as many. Waiting times are
    means."""
    first = found[0]
    texts = [own["texts"] for own in found]
    differing = [text["first_difference"] for text in texts if text["first_difference"] is not None]
    drafted, accepted = (sum_of_known([own[name] for own in found]) for name in ("drafted", "accepted"))
    return {
        **first,
        **{name: _estimate([own[name] for own in found]) for name in ("alpha", "block_efficiency")},
        **{name: _rate([own[name] for own in found]) for name in ("tokens_per_second", "own_tokens_per_second")},
        "latency": means([own["latency"] for own in found]),
        **{name: next(filter(None, (own[name] for own in found)), "") for name in ("no_alpha", "no_block_efficiency")},
        "drafted": drafted,
        "accepted": accepted,
        "draft_acceptance_rate": accepted / drafted if drafted and accepted is not None else None,
        "texts": {
            **texts[0],
            **{name: sum(text[name] for text in texts) for name in ("compared", "equal")},
            "first_difference": differing[0] if differing else None,
        },
    }


def _estimate(found: Sequence[Mapping[str, Any]]) -> Tree:
    """The ratio of the sums; where a process has none, none."""
    known = all(own["mean"] is not None and own["n"] for own in found)
    total = sum(own["n"] for own in found) if known else 0
    ratio = sum(own["mean"] * own["n"] for own in found) / total if total else None
    return {"mean": ratio, "stderr": None, "n": total}


def _rate(values: Sequence[float | None]) -> float | None:
    """The harmonic mean, if all are known."""
    known = [value for value in values if value is not None]
    return harmonic_mean(known) if len(known) == len(values) else None
