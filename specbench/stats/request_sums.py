"""Sums over each request of all that a run derives ratios from: from its rounds, laps and texts to columns."""

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from specbench.decoding.timer import Lap
from specbench.stats.bootstrap import time_clusters
from specbench.stats.estimates import Floats
from specbench.stats.formulas import DRAFTS, SECONDS_OF, TOKENS_OF
from specbench.stats.lenience_drift import drift_table
from specbench.stats.records import Group, PerRequestSums, Result, Round, RunRecord
from specbench.stats.round_sums import Tokens, round_sums

BETA_AT, TESTED_AT = "beta at ", "tested at "  # and a place in the round, counted from 0
Bytes = Callable[[float, float], float]  # bytes that so many calls read, with so many columns in all


def request_sums(
    record: RunRecord,
    batch_size: int,
    by_beta: bool,
    target: Bytes,
    drafter: Bytes | None = None,
    tokens: Tokens | None = None,
) -> PerRequestSums:
    """The sums of every finished request of a run, and its clusters. `by_beta` and `tokens` are as for `sums_of`;
    `target` and `drafter` say what calls with one token read (None: no drafter that is one model)."""
    requests = [result.request for result in record.results]
    columns: dict[str, Floats] = defaultdict(lambda: np.zeros(len(requests)))
    rows = (row for g in record.groups for row in _of_group(g, batch_size, by_beta, target, drafter, tokens))
    for number, row in enumerate(rows):
        for name, value in row.items():
            columns[name][number] = value
    found = time_clusters(record, batch_size)
    numbers = {name: number for number, name in enumerate(dict.fromkeys(found))}
    return PerRequestSums(
        [request.id for request in requests],
        [request.prompt_id for request in requests],
        [request.category for request in requests],
        [numbers[name] for name in found],
        [0] * len(requests),
        dict(columns),
    )


def sums_of(
    results: Sequence[Result], by_beta: bool = True, tokens: Tokens | None = None, alone: bool = False
) -> list[dict[str, float]]:
    """The sums over each request, all with the same names; times in seconds. `by_beta` says whether the verifier
    accepts a guess with probability beta; if not, nothing is known of luck. `tokens` and `alone` are as for
    `round_sums`."""
    rows = [_of_rounds(result, by_beta) | round_sums(result, tokens, alone) for result in results]
    names = dict.fromkeys(name for row in rows for name in row)  # not every request has drafts of every length
    return [{name: row.get(name, 0.0) for name in names} for row in rows]


def _of_group(
    group: Group, batch_size: int, by_beta: bool, target: Bytes, drafter: Bytes | None, tokens: Tokens | None
) -> list[dict[str, float]]:
    rows, share = sums_of(group.results, by_beta, tokens, alone=batch_size == 1), len(group.results)
    ours = ("prefill_seconds", "drafter_prefill_seconds", "wall_seconds", "record_seconds")
    whole = {name: getattr(group.speculative, name) / share for name in ours}
    whole |= {f"plain_{name}": getattr(group.baseline, name) / share for name in ("prefill_seconds", "wall_seconds")}
    for row, result in zip(rows, group.results, strict=True):
        columns = float(sum(r.position + result.request.columns for r in result.baseline.rounds))
        row |= whole | _texts(result) | {"plain_bytes": target(row["plain_calls"], columns)}
        if drafter is not None:  # of as many steps of the drafter
            row["drafter_bytes"] = drafter(row["plain_calls"], columns)
        for name, output in result.peers.items():
            row |= {f"{SECONDS_OF}{name}": output.decode_seconds, f"{TOKENS_OF}{name}": output.decoded}
    return rows


def _of_rounds(result: Result, by_beta: bool) -> dict[str, float]:
    """Counts and seconds of both ways of decoding."""
    rounds, tokens = [*result.speculative.rounds], len(result.speculative.tokens)
    betas = [sum(r.beta) for r in rounds]
    counts = {name: sum(getattr(r, name) for r in rounds)
              for name in ("accepted", "tested", "recovered", "bonus", "accepted_before_stop")}  # fmt: skip
    expected = sum(betas) if by_beta else counts["accepted"]
    found: dict[str, float] = counts | {
        "beta": sum(betas),
        "expected": tokens - counts["accepted"] + expected,  # tokens, without the luck of the draws
        "stops": tokens < result.limit,
        "tokens": tokens,
        "rounds": len(rounds),
        "drafted": sum(r.gamma for r in rounds),
        "verified": sum(r.width for r in rounds),
        "draft_seconds": _shared(rounds, Lap.DRAFT),
        "steps": sum(r.steps / r.rows for r in rounds),
        "verify_seconds": _shared(rounds, Lap.VERIFY),
        "calls": sum(1 / r.rows for r in rounds),
        "seconds": result.speculative.seconds,
        "plain_tokens": len(result.baseline.tokens),
        "plain_step_seconds": _shared(plain := [*result.baseline.rounds], Lap.VERIFY),
        "plain_calls": sum(1 / r.rows for r in plain),
        "plain_seconds": result.baseline.seconds,
    }
    for r in rounds:
        found[f"{DRAFTS}{r.gamma}"] = found.get(f"{DRAFTS}{r.gamma}", 0) + 1
        for place, beta in enumerate(r.beta):
            for name, value in ((BETA_AT, beta), (TESTED_AT, 1.0)):
                found[f"{name}{place}"] = found.get(f"{name}{place}", 0.0) + value
    return found


def _shared(rounds: Sequence[Round], lap: Lap) -> float:
    """A request's even share of this lap of its calls, in seconds."""
    return sum(r.seconds.get(lap, 0.0) / r.rows for r in rounds)


def _texts(result: Result) -> dict[str, float]:
    """Betas along plain decoding's text, and drift at tested positions of ours, where the texts were read."""
    found = dict.fromkeys(("text_beta", "text_tested", "drift_tv", "drift_kl", "drift_tested"), 0.0)
    if result.baseline_laws is not None:
        beta = result.baseline_laws.beta[np.isfinite(result.baseline_laws.beta)]
        found |= {"text_beta": float(beta.sum()), "text_tested": float(len(beta))}
    if result.speculative_laws is not None:
        table = drift_table(result)
        found |= {"drift_tv": float(table[0].sum()), "drift_kl": float(table[1].sum())}
        found["drift_tested"] = float(table.shape[1])
    return found
