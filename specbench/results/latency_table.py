"""How requests that arrived over time were served, as a table for the terminal."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from specbench.results.table import Table
from specbench.results.wording import interval
from specbench.stats.latency import DECODERS, PERCENTILES, enough

DELAYS = {"queue": 1.0, "first_token": 1.0, "per_token": 1e3}  # and what their seconds are multiplied by
NAMES = {"speculative": "speculative", "baseline": "plain"}


@dataclass
class ServedRow:
    """One decoder at one rate; `served` has `latency`, and `goodput` if there are limits."""

    rate: float | None  # None if unknown
    way: str
    served: dict[str, Any]
    requests: int

    @property
    def label(self) -> str:
        """The decoder, and the rate if it is known."""
        return NAMES[self.way] + ("" if self.rate is None else f", {self.rate:g}/s")

    def percentile(self, delay: str, percentile: int) -> float | None:
        """Seconds; None if too few requests are beyond it."""
        seconds: float | None = self.served["latency"][delay][f"p{percentile}"]
        return seconds if enough(percentile, self.requests) else None


def served_rows(result: dict[str, Any]) -> Iterator[ServedRow]:
    """A row for each rate and decoder, if requests arrived over time."""
    for entry in result["latency_by_rate"]:
        for way in DECODERS:
            yield ServedRow(entry["rate"], way, entry["decoders"][way], entry["requests"])


def load_table(result: dict[str, Any]) -> Table | None:
    """p50, p90 and p99 of each delay and, with limits, the goodput, by rate and decoder; None without such requests."""
    rows = []
    for served in served_rows(result):
        row = {"decoder": served.label, "requests": str(served.requests)}
        for delay, scale in DELAYS.items():
            row[f"{delay.replace('_', ' ')}, {'ms' if scale > 1 else 's'}"] = _delay(served, delay)
        if found := served.served["goodput"]:
            share, rate = found["ci95"]["share"], found["ci95"]["tokens_per_second"]
            row["within limits"] = f"{found['share']:.0%}" + (f" ({share[0]:.0%} to {share[1]:.0%})" if share else "")
            row["tokens/s within"] = f"{found['tokens_per_second']:.0f}" + (f" ({interval(rate, 0)})" if rate else "")
        rows.append(row)
    if not rows:
        return None
    few = any("too few" in cell for row in rows for cell in row.values())
    title = "waiting times, p50 / p90 / p99; per token: without the first round's tokens"
    title += "; too few: fewer than five requests are beyond it" * few
    return Table.of(rows, title, ["decoder", "requests"])


def _delay(row: ServedRow, delay: str) -> str:
    found = [row.percentile(delay, percentile) for percentile in PERCENTILES]
    digits, scale = (1, 1e3) if DELAYS[delay] > 1 else (3, 1.0)
    if not any(found):
        return "too few"
    return " / ".join("too few" if value is None else f"{value * scale:.{digits}f}" for value in found)
