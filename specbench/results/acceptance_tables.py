"""The acceptance tables of one run, as far as its results.json has the numbers."""

from collections.abc import Callable

from specbench.results.fields import ResultDict
from specbench.results.table import CellValue, Column, Table

WAYS = {"speculative": "speculative", "baseline": "plain"}
TIMES = {"first_token": "to the first token", "time_per_output_token": "per output token",
         "inter_token": "between rounds"}  # fmt: skip
READING = {"prefill_seconds": "reading a prompt, speculative", "drafter_prefill_seconds": "  by the drafter",
           "plain_prefill_seconds": "reading a prompt, plain"}  # fmt: skip
STATISTICS = ("mean", "p50", "p90", "p95", "p99")


def _columns(*columns: tuple[str, int | str | None], group: str = "") -> list[Column]:
    """Columns by name and digits; "%" is a share."""
    return [Column(name, group, 1, "%") if form == "%" else Column(name, group, form) for name, form in columns]  # type: ignore[arg-type]


def positions_table(result: ResultDict) -> Table | None:
    """Acceptance by place in the round."""
    found = result["acceptance"]
    if not found or not found["conditional"]:
        return None
    columns = _columns(("guess", None), ("tested", 0), ("accepted", 3), ("+-", 3), ("beta", 3), ("with all before", 3))
    rows: list[list[CellValue]] = []
    for place, (own, beta) in enumerate(zip(found["conditional"], result["beta_by_position"], strict=False)):
        joint = found["joint"][place]["mean"] if place < len(found["joint"]) else None
        rows.append([str(place + 1), own["n"], own["mean"], own["stderr"], beta["mean"], joint])
    return Table("acceptance by place in the round", columns, rows, check_of(result))


def check_of(result: ResultDict) -> list[str]:
    """The check of betas in a sentence, if there is one; of pooled runs it is that of the first process."""
    check = result["acceptance"]["check"]
    if not check:
        return []
    told = f"{check['accepted']:,} guesses were accepted where their betas say {check['expected']:,.1f}"
    return [f"{told} (z {check['z']:+.2f})" + " (first process)" * bool(result["repeats"])]


def lengths_table(result: ResultDict) -> Table | None:
    """How many guesses rounds accepted."""
    found = result["acceptance"]
    if not found:
        return None
    total, columns = sum(found["lengths"]), _columns(("accepted guesses", None), ("rounds", 0), ("share", "%"))
    rows: list[list[CellValue]] = [[str(n), count, count / total] for n, count in enumerate(found["lengths"])]
    return Table("rounds by accepted guesses", columns, rows)


def classes_table(result: ResultDict) -> Table | None:
    """Acceptance by the kind of the guess."""
    found = (result["acceptance"] or {}).get("by_token_class")
    if not found:
        return None
    total = sum(own["n"] for own in found.values())
    columns = _columns(("guess", None), ("tested", 0), ("share", "%"), ("accepted", 3), ("+-", 3))
    rows = [[name, own["n"], own["n"] / total, own["mean"], own["stderr"]] for name, own in found.items()]
    return Table("acceptance by the kind of the guess", columns, rows)


def entropy_table(result: ResultDict) -> Table | None:
    """Acceptance by the entropy of either model."""
    found = (result["acceptance"] or {}).get("by_entropy")
    if not found:
        return None
    edges = sorted({(own["low"], own["high"]) for bins in found.values() for own in bins}, key=lambda edge: edge[0])
    columns = _columns(("nats", None))
    for model in found:
        columns += _columns(("tested", 0), ("alpha", 3), ("+-", 3), ("accepted", 3), group=model)
    rows = []
    for low, high in edges:
        row: list[CellValue] = [f"{low:g} and more" if high is None else f"{low:g} to {high:g}"]
        for bins in found.values():
            own = next((b for b in bins if b["low"] == low), None)
            row += [own["alpha"]["n"], own["alpha"]["mean"], own["alpha"]["stderr"], own["accepted"]["mean"]] if own \
                else [0, None, None, None]  # fmt: skip
        rows.append(row)
    return Table("acceptance by entropy of the drafter's and the target's distribution", columns, rows)


def calibration_table(result: ResultDict) -> Table | None:
    """Calibration of the drafter."""
    found = (result["acceptance"] or {}).get("calibration")
    if not found:
        return None
    columns = _columns(
        ("largest q", None), ("positions", 0), ("mean q", 3), ("p there", 3), ("tested", 0), ("accepted", 3)
    )
    rows = [[f"{b['low']:.1f} to {b['high']:.1f}", b["positions"], b["confidence"], b["agreement"], b["accepted"]["n"],
             b["accepted"]["mean"]] for b in found["bins"]]  # fmt: skip
    rows.append(["all", found["positions"], found["confidence"], found["agreement"], None, None])
    return Table(f"calibration of the drafter: expected error {found['error']:.3f}", columns, rows)


def times_table(result: ResultDict) -> Table | None:
    """Times between tokens, in milliseconds."""
    found = {way: own for way, own in result["latency"].items() if own["inter_token"]}
    if not found:
        return None
    seconds = {f"{told}, {WAYS[way]}": [own[name].get(statistic) for statistic in STATISTICS]
               for name, told in TIMES.items() for way, own in found.items()}  # fmt: skip
    seconds |= {told: [result["cost"][name], None, None, None, None] for name, told in READING.items()}
    rows: list[list[CellValue]] = [[told, *(None if value is None else value * 1e3 for value in values)]
                               for told, values in seconds.items() if values != [None] * len(values)]  # fmt: skip
    return Table("times between tokens", _columns(("milliseconds", None), *((name, 1) for name in STATISTICS)), rows)


def rates_table(result: ResultDict) -> Table | None:
    """Tokens per second by the rows of a call, or by the rate at which requests arrived."""
    by_rate = [(f"{entry['rate']:g}/s" if entry["rate"] else "-", entry["decoders"])
               for entry in result["latency_by_rate"]
               if entry["decoders"]["speculative"]["tokens_per_second"] is not None]  # fmt: skip
    table = by_rate or [(_span(entry), entry) for entry in result["throughput_by_rows"]]
    if not table:
        return None
    columns = _columns(("arrivals" if by_rate else "rows of a call", None))
    for told in WAYS.values():
        columns += _columns(("tokens/s", 1), ("a user's", 1), group=told)
    names = ("tokens_per_second", "user_tokens_per_second")
    rows = [[name, *((own[way] or {}).get(rate) for way in WAYS for rate in names)] for name, own in table]
    return Table("tokens per second of all requests, and that one user sees", columns, rows)


def _span(entry: ResultDict) -> str:
    low, high = entry["rows_from"], entry["rows_to"]
    return str(high) if low == high else f"{low} to {high}"


TABLES: dict[str, Callable[[ResultDict], Table | None]] = {
    "positions": positions_table,
    "lengths": lengths_table,
    "classes": classes_table,
    "entropy": entropy_table,
    "calibration": calibration_table,
    "times": times_table,
    "rows": rates_table,
}
