"""The numbers of a run by category of prompts and by place in the draft, how far it drifts, and what requests wait for:
the first token, each later one, and a row if requests arrive over time."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from specbench.measure import formulas
from specbench.measure.record import Record, Text
from specbench.measure.sums import ACCEPTED_OF, BETA_AT, TESTED_AT, Estimate, Sample, finished

PERCENTILES = (50, 90, 99)
METHODS = ("speculative", "baseline")


def by_category(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The numbers of each category of a `prompts_frame`, in order of names; empty if the data name none."""
    if not frame["category"].astype(bool).any():
        return []
    found = []
    for name, own in frame.groupby("category", sort=True):
        sample = Sample(own)
        total, speedup = sample.total, sample.of_times(formulas.speedups)["measured"]
        efficiency = sample.of_tokens(formulas.block_efficiency)["block_efficiency"]
        rates = formulas.tokens_per_second(total)
        numbers = {
            "category": name,
            "prompts": len(own),
            "tokens": round(total["tokens"]),
            "alpha": mean_of(sample.of_tokens(formulas.acceptance)["alpha"], total["tested"]),
            "block_efficiency": {"mean": efficiency.value, "stderr": efficiency.stderr},
            "speedup": {"measured": speedup.value, "ci95": speedup.ci95},
        }
        names = ("speculative_tokens_per_second", "baseline_tokens_per_second")
        found.append(numbers | {rate: float(rates[rate]) for rate in names})
    return found


def mean_of(estimate: Estimate, n: float) -> dict[str, Any]:
    """An estimate over n positions, guesses or rounds, as results.json has it."""
    return {"mean": estimate.value, "stderr": estimate.stderr, "n": round(n)}


def acceptance(sample: Sample) -> dict[str, Any]:
    """`lengths`: how many rounds accepted 0, 1, .. guesses. `by_place`: the mean of beta at each tested place."""
    total = sample.total
    lengths, places = (
        sorted(int(name.removeprefix(prefix)) for name in total if name.startswith(prefix))
        for prefix in (ACCEPTED_OF, TESTED_AT)
    )
    means = sample.of_tokens(lambda s: {str(n): s[f"{BETA_AT}{n}"] / s[f"{TESTED_AT}{n}"] for n in places})
    return {
        "lengths": [round(total.get(f"{ACCEPTED_OF}{n}", 0)) for n in range(max(lengths, default=-1) + 1)],
        "by_place": [
            {"place": place} | mean_of(means[str(place)], total[f"{TESTED_AT}{place}"])
            for place in places
            if means[str(place)].value is not None
        ],
    }


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
    methods = waits_frame(records, rows).groupby("method", sort=False)
    return {name: {method: percentiles(own[name]) for method, own in methods} for name in ("first_token", "per_token")}


def served(records: Sequence[Record], rows: int) -> dict[str, Any]:
    """Of requests that arrive over time, by method: percentiles of the wait for a row, and tokens per second from the
    first arrival to the last token, all groups together. Empty if all requests were there at once."""
    waits, found = waits_frame(records, rows), {}
    if waits["arrived"].isna().any():
        return {}
    for method, own in waits.groupby("method", sort=False):
        groups = own.groupby(["process", "group"])
        seconds = (groups["finished"].max() - groups["arrived"].min()).sum()
        rate = float(own["tokens"].sum() / seconds)
        found[str(method)] = {"queue": percentiles(own["queue"]), "tokens_per_second": rate}
    return found


def waits_frame(records: Sequence[Record], rows: int) -> pd.DataFrame:
    """A row for each method and finished request whose waits count. Where requests arrive over time, the first ones of
    each group, one for every row, find nothing to wait for and are left out, unless there are no others."""
    frame = pd.DataFrame(
        {"method": method, "process": record.process, "group": record.group} | waits_of(vars(record)[method])
        for record in finished(records)
        for method in METHODS
    )
    arrived = frame.groupby(["method", "process", "group"])["arrived"]
    return frame[~(arrived.rank(method="first") <= rows) | (arrived.transform("size") <= rows)]


def waits_of(text: Text) -> dict[str, float]:
    """The tokens of a request and its waits in seconds, NaN where there is no such wait. Of one that was there at once
    the first token comes after its prompt was read and the first round; it waits for the whole of each of its calls."""
    rounds, times = text.rounds, text.times
    later = sum(rounds.tokens[1:]) or np.nan
    if times is not None:
        waits = {"queue": times["admitted"] - times["arrived"], "first_token": times["first_token"] - times["arrived"]}
        per_token = (times["finished"] - times["first_token"]) / later
        return times | waits | {"per_token": per_token, "tokens": len(text.ids)}
    calls = np.array([rounds.draft, rounds.verify, rounds.accept, rounds.host], float).sum(0)
    first = text.prefill_seconds + text.drafter_prefill_seconds + float(calls[:1].sum())
    alone = bool(len(rounds)) and max(rounds.rows) == 1
    return {"arrived": np.nan, "first_token": first if alone else np.nan, "per_token": float(calls[1:].sum()) / later}


def percentiles(seconds: Sequence[float]) -> dict[str, float | None]:
    """The PERCENTILES of those that are numbers; None without any."""
    known = np.array(seconds, float)
    known = known[np.isfinite(known)]
    return {f"p{share}": float(np.percentile(known, share)) if len(known) else None for share in PERCENTILES}
