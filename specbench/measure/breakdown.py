"""The numbers of a run by category of prompts and by place in the draft, how far it drifts, and what requests wait for:
the first token, each later one, and a row if requests arrive over time."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
import pandas as pd

from specbench.measure import formulas
from specbench.measure.record import Record, Text
from specbench.measure.sums import ACCEPTED_OF, BETA_AT, TESTED_AT, Estimate, Sample, Sums, finished

PERCENTILES = (50, 90, 99)
METHODS = ("speculative", "baseline")
Waits = dict[str, float]  # seconds: "queue", "first_token", "per_token"; not a number where there is no such wait


def by_category(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The numbers of each category of a `prompts_frame`, in order of names; empty if the data name none."""
    if not frame["category"].astype(bool).any():
        return []
    return [{"category": name} | _numbers(Sample(own)) for name, own in frame.groupby("category", sort=True)]


def _numbers(sample: Sample) -> dict[str, Any]:
    """The numbers of some requests."""
    total, speedup = sample.total, sample.of_times(formulas.speedups)["measured"]
    efficiency = sample.of_tokens(formulas.block_efficiency)["block_efficiency"]
    rates = formulas.tokens_per_second(total)
    return {
        "prompts": len(sample.frame),
        "tokens": round(total["tokens"]),
        "alpha": mean_of(sample.of_tokens(formulas.acceptance)["alpha"], total["tested"]),
        "block_efficiency": {"mean": efficiency.value, "stderr": efficiency.stderr},
        "speedup": {"measured": speedup.value, "ci95": speedup.ci95},
        **{name: float(rates[name]) for name in ("speculative_tokens_per_second", "baseline_tokens_per_second")},
    }


def mean_of(estimate: Estimate, n: float) -> dict[str, Any]:
    """An estimate over n positions, guesses or rounds, as results.json has it."""
    return {"mean": estimate.value, "stderr": estimate.stderr, "n": round(n)}


def acceptance(sample: Sample) -> dict[str, Any]:
    """`lengths`: how many rounds accepted 0, 1, .. guesses. `by_place`: the mean of beta at each place of the draft,
    over the rounds that tested it."""
    total = sample.total
    lengths, places = (numbers_behind(total, prefix) for prefix in (ACCEPTED_OF, TESTED_AT))
    means = sample.of_tokens(lambda s: {str(n): s[f"{BETA_AT}{n}"] / s[f"{TESTED_AT}{n}"] for n in places})
    return {
        "lengths": [round(total.get(f"{ACCEPTED_OF}{n}", 0)) for n in range(max(lengths, default=-1) + 1)],
        "by_place": [
            {"place": place} | mean_of(means[str(place)], total[f"{TESTED_AT}{place}"])
            for place in places
            if means[str(place)].value is not None
        ],
    }


def numbers_behind(columns: Sums, prefix: str) -> list[int]:
    """The numbers behind a prefix in the names of columns, in order."""
    return sorted(int(name.removeprefix(prefix)) for name in columns if name.startswith(prefix))


def drift(sample: Sample) -> dict[str, Any] | None:
    """What lossy decoding costs: the means over tested positions of total variation and KL between its output
    distribution and the target's, and the largest bound of A.5; None of runs in which nothing drifts."""
    if "drift positions" not in sample.columns:
        return None
    means = sample.of_tokens(formulas.drifts)
    found: dict[str, Any] = {name: {"mean": each.value, "ci95": each.ci95} for name, each in means.items()}
    return found | {"bound": float(sample.columns["drift bound"].max())}


def latency(records: Sequence[Record], rows: int) -> dict[str, dict[str, Any]]:
    """Percentiles in seconds of the wait for the first token and of the mean wait for the tokens after the first round:
    {"first_token": {"speculative": {"p50": .., ..}, "baseline": ..}, "per_token": ..}."""
    own = [record for group in counted(records, rows) for record in group]
    waits = {method: [waits_of(vars(record)[method]) for record in own] for method in METHODS}
    return {
        name: {method: percentiles([wait[name] for wait in of]) for method, of in waits.items()}
        for name in ("first_token", "per_token")
    }


def waits_of(text: Text) -> Waits:
    """The waits of a request. Of one that was there at once the first token comes after its prompt was read and the
    first round; it waits for the whole of each call that it is in."""
    rounds, times = text.rounds, text.times
    later = sum(rounds.tokens[1:])
    if times is not None:
        per_token = (times["finished"] - times["first_token"]) / later if later else np.nan
        first = times["first_token"] - times["arrived"]
        return {"queue": times["admitted"] - times["arrived"], "first_token": first, "per_token": per_token}
    calls = np.array([rounds.draft, rounds.verify, rounds.accept, rounds.host], float).sum(0)
    first = text.prefill_seconds + text.drafter_prefill_seconds + float(calls[:1].sum())
    alone = bool(len(rounds)) and max(rounds.rows) == 1
    per_token = float(calls[1:].sum()) / later if later else np.nan
    return {"queue": np.nan, "first_token": first if alone else np.nan, "per_token": per_token}


def counted(records: Sequence[Record], rows: int) -> list[list[Record]]:
    """The finished records whose waits count, those that were decoded together as one list. Where requests arrive over
    time, the first ones of each group, one for every row, find nothing to wait for and are left out, unless there are
    no others."""
    found = []
    done = sorted(finished(records), key=lambda record: (record.process, record.group))
    for _, together in groupby(done, key=lambda record: (record.process, record.group)):
        group = [*together]
        if all(record.speculative and record.speculative.times for record in group):
            group.sort(key=lambda record: times_of(record, "speculative")["arrived"])
            group = group[rows:] or group
        found.append(group)
    return found


def times_of(record: Record, method: str) -> dict[str, float]:
    """When a request arrived, was admitted and so on; empty if it was there at once."""
    return vars(record)[method].times or {}


def percentiles(seconds: Sequence[float]) -> dict[str, float | None]:
    """The PERCENTILES of those that are numbers; None without any."""
    known = np.array(seconds, float)
    known = known[np.isfinite(known)]
    return {f"p{share}": float(np.percentile(known, share)) if len(known) else None for share in PERCENTILES}


def served(records: Sequence[Record], rows: int) -> dict[str, Any]:
    """Of requests that arrive over time, by method: percentiles of the wait for a row, and tokens per second from the
    first arrival to the last token, all groups together. Empty if all requests were there at once."""
    groups = counted(records, rows)
    own = [record for group in groups for record in group]
    if not own or not all(times_of(record, method) for record in own for method in METHODS):
        return {}
    found = {}
    for method in METHODS:
        times = [[times_of(record, method) for record in group] for group in groups]
        seconds = sum(max(t["finished"] for t in group) - min(t["arrived"] for t in group) for group in times)
        tokens = sum(len(vars(record)[method].ids) for record in own)
        queue = percentiles([waits_of(vars(record)[method])["queue"] for record in own])
        found[method] = {"queue": queue, "tokens_per_second": tokens / seconds}
    return found
