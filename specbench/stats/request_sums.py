"""Sums over each request of all that a run derives ratios from, so that runs can be pooled without their rounds."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from specbench.stats.accounting import sums_of
from specbench.stats.bootstrap_clusters import time_clusters
from specbench.stats.lenience_drift import drift_table
from specbench.stats.records import Floats, Group, PerRequestSums, Result, RunRecord
from specbench.stats.round_sums import round_sums
from specbench.stats.token_types import Tokens

AT_A_TIME = 1000  # groups of requests that become columns together, which bounds memory
BETA_AT, TESTED_AT = "beta at ", "tested at "  # and a place in the round, counted from 0
SECONDS_OF, TOKENS_OF = "seconds of ", "tokens of "  # and a peer
Bytes = Callable[[float, float], float]  # bytes that so many calls read, with so many columns in all


def request_sums(
    record: RunRecord,
    batch_size: int,
    by_beta: bool,
    target: Bytes,
    drafter: Bytes | None = None,
    tokens: Tokens | None = None,
) -> PerRequestSums:
    """The sums of every finished request of a run, and its clusters. `by_beta` is as for `sums_of`; `target` and
    `drafter` say what calls with one token read (None: no drafter that is one model); `tokens` is as for `round_sums`.
    """
    columns: dict[str, list[Floats]] = {}
    done = 0
    for begin in range(0, len(record.groups), AT_A_TIME):
        rows = [row for group in record.groups[begin : begin + AT_A_TIME]
                for row in _of_group(group, batch_size, by_beta, target, drafter, tokens)]  # fmt: skip
        for name in dict.fromkeys(name for row in rows for name in row):
            known = columns.setdefault(name, [np.zeros(done)] if done else [])
            known.append(np.array([row.get(name, 0.0) for row in rows], float))
        done += len(rows)
        for parts in columns.values():
            if (missing := done - sum(map(len, parts))) > 0:
                parts.append(np.zeros(missing))
    requests = [result.request for result in record.results]
    found = time_clusters(record, batch_size)
    numbers = {name: number for number, name in enumerate(dict.fromkeys(found))}
    return PerRequestSums(
        [request.id for request in requests],
        [request.prompt_id for request in requests],
        [request.category for request in requests],
        [numbers[name] for name in found],
        [0] * len(requests),
        {name: np.concatenate(parts) for name, parts in columns.items()},
    )


def _of_group(
    group: Group, batch_size: int, by_beta: bool, target: Bytes, drafter: Bytes | None, tokens: Tokens | None
) -> list[dict[str, float]]:
    rows = sums_of(group.results, by_beta)
    share = len(group.results)
    whole = {
        "prefill_seconds": group.speculative.prefill_seconds / share,
        "drafter_prefill_seconds": group.speculative.drafter_prefill_seconds / share,
        "plain_prefill_seconds": group.baseline.prefill_seconds / share,
        "wall_seconds": group.speculative.wall_seconds / share,
        "plain_wall_seconds": group.baseline.wall_seconds / share,
        "record_seconds": group.speculative.record_seconds / share,
    }
    return [
        row
        | whole
        | _counts(result)
        | _by_place(result)
        | _texts(result)
        | _bytes(result, row, target, drafter)
        | round_sums(result, tokens, alone=batch_size == 1)
        for row, result in zip(rows, group.results, strict=True)
    ]


def _counts(result: Result) -> dict[str, float]:
    """Counts of rounds that no factor needs, and what peers took."""
    rounds = list(result.speculative.rounds)
    found: dict[str, float] = {
        "accepted": sum(r.accepted for r in rounds),
        "recovered": sum(r.recovered for r in rounds),
        "bonus": sum(r.bonus for r in rounds),
        "accepted_before_stop": sum(r.accepted_before_stop for r in rounds),
        "verified": sum(r.width for r in rounds),
    }
    for name, output in result.peers.items():
        found |= {f"{SECONDS_OF}{name}": output.decode_seconds, f"{TOKENS_OF}{name}": output.decoded}
    return found


def _by_place(result: Result) -> dict[str, float]:
    """Betas and tested guesses by place in the round."""
    found: dict[str, float] = {}
    for r in result.speculative.rounds:
        for place, beta in enumerate(r.beta):
            for name, value in ((BETA_AT, beta), (TESTED_AT, 1.0)):
                found[f"{name}{place}"] = found.get(f"{name}{place}", 0.0) + value
    return found


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


def _bytes(result: Result, row: Mapping[str, Any], target: Bytes, drafter: Bytes | None) -> dict[str, float]:
    """Bytes that the steps of plain decoding read, and those of as many steps of the drafter."""
    columns = float(sum(r.position + result.request.columns for r in result.baseline.rounds))
    found = {"plain_bytes": target(row["plain_calls"], columns)}
    return found if drafter is None else found | {"drafter_bytes": drafter(row["plain_calls"], columns)}


def rates(s: Mapping[str, Any]) -> dict[str, Any]:
    """Ours and plain decoding's throughput, tokens per second, from sums over requests."""
    return {
        "speculative_tokens_per_second": s["tokens"] / s["seconds"],
        "baseline_tokens_per_second": s["plain_tokens"] / s["plain_seconds"],
    }


def prefills(s: Mapping[str, Any]) -> dict[str, float]:
    """Seconds in which a prompt is read: by target and drafter, by the drafter, and by the target in plain decoding."""
    names = ("prefill_seconds", "drafter_prefill_seconds", "plain_prefill_seconds")
    return {name: float(s[name] / s["requests"]) for name in names}


def drifts(s: Mapping[str, Any]) -> dict[str, Any]:
    """Total variation and KL of a tested position, from sums over requests."""
    return {name: s[f"drift_{name}"] / s["drift_tested"] for name in ("tv", "kl")}


def bandwidths(s: Mapping[str, Any]) -> dict[str, Any]:
    """Bytes that a step of plain decoding reads over its time, and of the drafter's step, if its bytes are known."""
    found = {"target_bytes_per_second": s["plain_bytes"] / s["plain_step_seconds"]}
    if "drafter_bytes" in s:
        a_step = s["drafter_bytes"] / s["plain_calls"]
        found["drafter_bytes_per_second"] = a_step / (s["draft_seconds"] / np.where(s["steps"] > 0, s["steps"], np.nan))
    return found


def end_to_end(s: Mapping[str, Any]) -> dict[str, Any]:
    """The speedup with prefill, from sums over requests."""
    plain = (s["plain_seconds"] + s["plain_prefill_seconds"]) / s["plain_tokens"]
    return {"end_to_end": plain / ((s["seconds"] + s["prefill_seconds"]) / s["tokens"])}
