"""The acceptance tables of one run, as far as its results.json has the numbers."""

from collections.abc import Callable, Mapping
from typing import Any

from specbench.results.export import Column, Sheet

Result = Mapping[str, Any]
WAYS = {"speculative": "speculative", "baseline": "plain"}
TIMES = {"first_token": "to the first token", "time_per_output_token": "per output token",
         "inter_token": "between rounds"}  # fmt: skip
READING = {"prefill_seconds": "reading a prompt, speculative", "drafter_prefill_seconds": "  by the drafter",
           "plain_prefill_seconds": "reading a prompt, plain"}  # fmt: skip
STATISTICS = ("mean", "p50", "p90", "p95", "p99")


def positions(result: Result) -> Sheet | None:
    """Acceptance by place in the round."""
    found = result.get("acceptance")
    if not found or not found["conditional"]:
        return None
    columns = [
        Column("guess", digits=None),
        Column("tested", digits=0),
        Column("accepted", digits=3),
        Column("+-", digits=3),
    ]
    columns += [Column("beta", digits=3), Column("with all before", digits=3)]
    rows = []
    for place, (own, beta) in enumerate(zip(found["conditional"], result["beta_by_position"], strict=False)):
        joint = found["joint"][place] if place < len(found["joint"]) else {"mean": None}
        rows.append([str(place + 1), own["n"], own["mean"], own["stderr"], beta["mean"], joint["mean"]])
    return Sheet("acceptance by place in the round", columns, rows, check_of(result))


def check_of(result: Result) -> list[str]:
    """The check of betas in a sentence, if there is one; of pooled runs it is that of the first process."""
    check = result["acceptance"]["check"]
    if not check:
        return []
    told = f"{check['accepted']:,} guesses were accepted where their betas say {check['expected']:,.1f}"
    told += f" (z {check['z']:+.2f})"
    return [f"{told} (first process)" if result.get("repeats") else told]


def lengths(result: Result) -> Sheet | None:
    """How many guesses rounds accepted."""
    found = result.get("acceptance")
    if not found:
        return None
    total = sum(found["lengths"])
    columns = [Column("accepted guesses", digits=None), Column("rounds", digits=0), Column("share", digits=1, unit="%")]
    rows = [[str(n), count, count / total] for n, count in enumerate(found["lengths"])]
    return Sheet("rounds by accepted guesses", columns, rows)


def classes(result: Result) -> Sheet | None:
    """Acceptance by the kind of the guess."""
    found = (result.get("acceptance") or {}).get("by_token_class")
    if not found:
        return None
    total = sum(own["n"] for own in found.values())
    columns = [Column("guess", digits=None), Column("tested", digits=0), Column("share", digits=1, unit="%")]
    columns += [Column("accepted", digits=3), Column("+-", digits=3)]
    rows = [[name, own["n"], own["n"] / total, own["mean"], own["stderr"]] for name, own in found.items()]
    return Sheet("acceptance by the kind of the guess", columns, rows)


def entropy(result: Result) -> Sheet | None:
    """Acceptance by the entropy of either model."""
    found = (result.get("acceptance") or {}).get("by_entropy")
    if not found:
        return None
    edges = sorted({(own["low"], own["high"]) for bins in found.values() for own in bins}, key=lambda edge: edge[0])
    columns = [Column("nats", digits=None)]
    for model in found:
        columns += [Column("tested", model, 0), Column("alpha", model, 3), Column("+-", model, 3)]
        columns += [Column("accepted", model, 3)]
    rows = []
    for low, high in edges:
        row: list[Any] = [f"{low:g} and more" if high is None else f"{low:g} to {high:g}"]
        for bins in found.values():
            own = next((b for b in bins if b["low"] == low), None)
            row += [own["alpha"]["n"], own["alpha"]["mean"], own["alpha"]["stderr"], own["accepted"]["mean"]] if own \
                else [0, None, None, None]  # fmt: skip
        rows.append(row)
    return Sheet("acceptance by entropy of the drafter's and the target's distribution", columns, rows)


def calibration(result: Result) -> Sheet | None:
    """Calibration of the drafter."""
    found = (result.get("acceptance") or {}).get("calibration")
    if not found:
        return None
    columns = [Column("largest q", digits=None), Column("positions", digits=0), Column("mean q", digits=3)]
    columns += [Column("p there", digits=3), Column("tested", digits=0), Column("accepted", digits=3)]
    rows = [[f"{b['low']:.1f} to {b['high']:.1f}", b["positions"], b["confidence"], b["agreement"], b["accepted"]["n"],
             b["accepted"]["mean"]] for b in found["bins"]]  # fmt: skip
    rows.append(["all", found["positions"], found["confidence"], found["agreement"], None, None])
    return Sheet(f"calibration of the drafter: expected error {found['error']:.3f}", columns, rows)


def times(result: Result) -> Sheet | None:
    """Times between tokens, in milliseconds."""
    found = {way: own for way, own in result["latency"].items() if own.get("inter_token")}
    if not found:
        return None
    columns = [Column("milliseconds", digits=None), *(Column(name, digits=1) for name in STATISTICS)]
    rows = []
    for name, told in TIMES.items():
        for way, own in found.items():
            values = [own[name].get(statistic) for statistic in STATISTICS]
            if any(value is not None for value in values):
                rows.append([f"{told}, {WAYS[way]}", *(None if v is None else v * 1e3 for v in values)])
    for name, told in READING.items():
        if (seconds := result["cost"].get(name)) is not None:
            rows.append([told, seconds * 1e3, None, None, None, None])
    return Sheet("times between tokens", columns, rows)


def rows_together(result: Result) -> Sheet | None:
    """Tokens per second by the rows of a call, or by the rate at which requests arrived."""
    by_rate = [(f"{entry['rate']:g}/s" if entry["rate"] else "-", entry["decoders"])
               for entry in result.get("latency_by_rate", ())]  # fmt: skip
    by_rows = [(_span(entry), entry) for entry in result.get("throughput_by_rows", ())]
    by_rate = [(name, own) for name, own in by_rate if own["speculative"].get("tokens_per_second") is not None]
    table = by_rate or by_rows
    if not table:
        return None
    columns = [Column("arrivals" if by_rate else "rows of a call", digits=None)]
    columns += [Column(what, told, 1) for told in WAYS.values() for what in ("tokens/s", "a user's")]
    rows = []
    for name, own in table:
        row: list[Any] = [name]
        for way in WAYS:
            rate = own[way] or {"tokens_per_second": None, "user_tokens_per_second": None}
            row += [rate["tokens_per_second"], rate["user_tokens_per_second"]]
        rows.append(row)
    return Sheet("tokens per second of all requests, and that one user sees", columns, rows)


def _span(entry: Result) -> str:
    low, high = entry["rows_from"], entry["rows_to"]
    return str(high) if low == high else f"{low} to {high}"


SHEETS: dict[str, Callable[[Result], Sheet | None]] = {
    "positions": positions,
    "lengths": lengths,
    "classes": classes,
    "entropy": entropy,
    "calibration": calibration,
    "times": times,
    "rows": rows_together,
}
