"""What requests wait for: the first token, each later one, and a row if requests arrive over time; and goodput."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specbench.measure.record import Record, Text
from specbench.measure.rounds import finished

PERCENTILES = (50, 90, 99)
METHODS = ("speculative", "baseline")
Waits = dict[str, float]  # seconds: "queue", "first_token", "per_token"; not a number where there is no such wait


def latency(records: Sequence[Record], rows: int) -> dict[str, dict[str, Any]]:
    """Percentiles in seconds of the wait for the first token and of the mean wait for the tokens after the first round:
    {"first_token": {"speculative": {"p50": .., ..}, "baseline": ..}, "per_token": ..}."""
    waits = {method: [waits_of(record, method) for record in counted(records, rows)] for method in METHODS}
    return {name: {method: percentiles([wait[name] for wait in own]) for method, own in waits.items()}
            for name in ("first_token", "per_token")}  # fmt: skip


def waits_of(record: Record, method: str) -> Waits:
    """The waits of a request. Of one that was there at once the first token comes after its prompt was read and the
    first round; it waits for the whole of each call that it is in."""
    text = text_of(record, method)
    rounds, times = text.rounds, text.times
    later = len(text.ids) - (rounds.tokens[0] if len(rounds) else len(text.ids))
    if times is not None:
        per_token = (times["finished"] - times["first_token"]) / later if later else np.nan
        first = times["first_token"] - times["arrived"]
        return {"queue": times["admitted"] - times["arrived"], "first_token": first, "per_token": per_token}
    calls = np.array([rounds.draft, rounds.verify, rounds.accept, rounds.host], float).sum(0)
    first = text.prefill_seconds + text.drafter_prefill_seconds + float(calls[:1].sum())
    alone = bool(len(rounds)) and max(rounds.rows) == 1
    per_token = float(calls[1:].sum()) / later if later else np.nan
    return {"queue": np.nan, "first_token": first if alone else np.nan, "per_token": per_token}


def text_of(record: Record, method: str) -> Text:
    """The text of a finished record."""
    text = record.speculative if method == "speculative" else record.baseline
    assert text is not None
    return text


def counted(records: Sequence[Record], rows: int) -> list[Record]:
    """The finished records whose waits count. Where requests arrive over time, the first ones of each group, one for
    every row, find nothing to wait for and are left out, unless there are no others."""
    groups: dict[tuple[int, int], list[Record]] = defaultdict(list)
    for record in finished(records):
        groups[record.process, record.group].append(record)
    return [record for group in groups.values() for record in (_warm(group, rows) or group)]


def _warm(group: Sequence[Record], rows: int) -> list[Record]:
    """The records of a group without those that came first; all if they were there at once."""
    if any(text_of(record, method).times is None for record in group for method in METHODS):
        return list(group)
    return sorted(group, key=lambda record: (text_of(record, "speculative").times or {})["arrived"])[rows:]


def percentiles(seconds: Sequence[float]) -> dict[str, float | None]:
    """The PERCENTILES of those that are numbers; None without any."""
    known = np.array(seconds, float)
    known = known[np.isfinite(known)]
    return {f"p{share}": float(np.percentile(known, share)) if len(known) else None for share in PERCENTILES}


def served(records: Sequence[Record], rows: int, limits: Mapping[str, Any]) -> dict[str, Any]:
    """Of requests that arrive over time, by method: percentiles of the wait for a row, tokens per second from the first
    arrival to the last token, and goodput, the share and the tokens per second of requests within the `limits`
    slo_first_token and slo_per_token in seconds (0: no limit). Empty if all requests were there at once."""
    own = counted(records, rows)
    if not own or any(text_of(record, method).times is None for record in own for method in METHODS):
        return {}
    return {method: _served(own, method, limits) for method in METHODS}


def _served(records: Sequence[Record], method: str, limits: Mapping[str, Any]) -> dict[str, Any]:
    waits = [waits_of(record, method) for record in records]
    first, later = (float(limits.get(f"slo_{name}") or np.inf) for name in ("first_token", "per_token"))
    within = [wait["first_token"] <= first and not wait["per_token"] > later for wait in waits]
    tokens = np.array([len(text_of(record, method).ids) for record in records], float)
    seconds = _duration(records, method)
    return {
        "queue": percentiles([wait["queue"] for wait in waits]),
        "tokens_per_second": float(tokens.sum()) / seconds,
        "goodput": {"share": float(np.mean(within)), "tokens_per_second": float(tokens[within].sum()) / seconds},
    }


def _duration(records: Sequence[Record], method: str) -> float:
    """Seconds from the first arrival to the last token, all groups together."""
    groups: dict[tuple[int, int], list[dict[str, float]]] = defaultdict(list)
    for record in records:
        groups[record.process, record.group].append(text_of(record, method).times or {})
    return sum(max(t["finished"] for t in own) - min(t["arrived"] for t in own) for own in groups.values())
