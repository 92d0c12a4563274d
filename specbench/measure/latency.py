"""What requests wait for: the first token, each later one, and a row if requests arrive over time."""

from collections import defaultdict
from collections.abc import Sequence
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
    found: list[Record] = []
    for group in by_group(finished(records)):
        arrived = [record for record in group if _times(record, "speculative")]
        arrived.sort(key=lambda record: _times(record, "speculative")["arrived"])
        found += arrived[rows:] or group
    return found


def by_group(records: Sequence[Record]) -> list[list[Record]]:
    """The records that were decoded together."""
    groups: dict[tuple[int, int], list[Record]] = defaultdict(list)
    for record in records:
        groups[record.process, record.group].append(record)
    return [*groups.values()]


def _times(record: Record, method: str) -> dict[str, float]:
    """When a request arrived, was admitted and so on; empty if it was there at once."""
    return text_of(record, method).times or {}


def percentiles(seconds: Sequence[float]) -> dict[str, float | None]:
    """The PERCENTILES of those that are numbers; None without any."""
    known = np.array(seconds, float)
    known = known[np.isfinite(known)]
    return {f"p{share}": float(np.percentile(known, share)) if len(known) else None for share in PERCENTILES}


def served(records: Sequence[Record], rows: int) -> dict[str, Any]:
    """Of requests that arrive over time, by method: percentiles of the wait for a row, and tokens per second from the
    first arrival to the last token, all groups together. Empty if all requests were there at once."""
    own = counted(records, rows)
    if not own or not all(_times(record, method) for record in own for method in METHODS):
        return {}
    found = {}
    for method in METHODS:
        groups = [[_times(record, method) for record in group] for group in by_group(own)]
        seconds = sum(max(t["finished"] for t in group) - min(t["arrived"] for t in group) for group in groups)
        tokens = sum(len(text_of(record, method).ids) for record in own)
        queue = percentiles([waits_of(record, method)["queue"] for record in own])
        found[method] = {"queue": queue, "tokens_per_second": tokens / seconds}
    return found
