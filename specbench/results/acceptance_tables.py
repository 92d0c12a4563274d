"""The acceptance tables of one run, from its results.json; without rows where that does not have the numbers."""

from collections.abc import Callable

from specbench.results.fields import ResultDict
from specbench.results.latency_table import NAMES
from specbench.results.table import CellValue, Table, table_columns

TIMES = {"first_token": "to the first token", "inter_token": "between rounds",
         "time_per_output_token": "per token after the first (as serving benchmarks)"}  # fmt: skip
READING = {"prefill_seconds": "reading a prompt, speculative", "drafter_prefill_seconds": "  by the drafter",
           "plain_prefill_seconds": "reading a prompt, plain"}  # fmt: skip
STATISTICS = ("mean", "p50", "p90", "p95", "p99")


def positions_table(result: ResultDict) -> Table:
    """Acceptance by place in the round."""
    found = result["acceptance"] or {"conditional": [], "joint": [], "check": None}
    joint = [own["mean"] for own in found["joint"]]
    joint += [None] * (len(found["conditional"]) - len(joint))
    rows: list[list[CellValue]] = [
        [str(place), own["n"], own["mean"], own["stderr"], beta["mean"], whole]
        for place, (own, beta, whole) in enumerate(
            zip(found["conditional"], result["beta_by_position"], joint, strict=False), 1)
    ]  # fmt: skip
    columns = table_columns(("guess", "text"), ("tested", 0), ("accepted", 3), ("+-", 3), ("beta", 3),
                         ("with all before", 3))  # fmt: skip
    return Table("acceptance by place in the round", columns, rows, check_of(result) if rows else [])


def check_of(result: ResultDict) -> list[str]:
    """The check of betas in a sentence, if there is one; of pooled runs it is that of the first process."""
    check = result["acceptance"]["check"]
    if not check:
        return []
    told = f"{check['accepted']:,} guesses were accepted where their betas say {check['expected']:,.1f}"
    return [f"{told} (z {check['z']:+.2f})" + " (first process)" * bool(result["repeats"])]


def lengths_table(result: ResultDict) -> Table:
    """How many guesses rounds accepted."""
    counts = (result["acceptance"] or {}).get("lengths", [])
    rows: list[list[CellValue]] = [
        [str(length), count, count / max(1, sum(counts))] for length, count in enumerate(counts)
    ]
    columns = table_columns(("accepted guesses", "text"), ("rounds", 0), ("share", "%"))
    return Table("rounds by accepted guesses", columns, rows)


def classes_table(result: ResultDict) -> Table:
    """Acceptance by the kind of the guess."""
    found = (result["acceptance"] or {}).get("by_token_class") or {}
    total = sum(own["n"] for own in found.values())
    rows = [[name, own["n"], own["n"] / total, own["mean"], own["stderr"]] for name, own in found.items()]
    columns = table_columns(("guess", "text"), ("tested", 0), ("share", "%"), ("accepted", 3), ("+-", 3))
    return Table("acceptance by the kind of the guess", columns, rows)


def entropy_table(result: ResultDict) -> Table:
    """Acceptance by the entropy of either model."""
    found = (result["acceptance"] or {}).get("by_entropy") or {}
    columns = table_columns(("nats", "text"))
    rows: dict[float, list[CellValue]] = {}
    for low, high in sorted((own["low"], own["high"] or 0) for bins in found.values() for own in bins):
        rows[low] = [f"{low:g} to {high:g}" if high else f"{low:g} and more"]
    for model, bins in found.items():
        columns += table_columns(("tested", 0), ("alpha", 3), ("+-", 3), ("accepted", 3), group=model)
        own = {entry["low"]: entry for entry in bins}
        for low, row in rows.items():
            alpha = own[low]["alpha"] if low in own else {"n": 0, "mean": None, "stderr": None}
            row += [alpha["n"], alpha["mean"], alpha["stderr"], own[low]["accepted"]["mean"] if low in own else None]
    return Table("acceptance by entropy of the drafter's and the target's distribution", columns, [*rows.values()])


def calibration_table(result: ResultDict) -> Table:
    """Calibration of the drafter."""
    columns = table_columns(("largest q", "text"), ("positions", 0), ("mean q", 3), ("p there", 3), ("tested", 0),
                         ("accepted", 3))  # fmt: skip
    found = (result["acceptance"] or {}).get("calibration")
    if not found:
        return Table("", columns, [])
    rows = [[f"{b['low']:.1f} to {b['high']:.1f}", b["positions"], b["confidence"], b["agreement"], b["accepted"]["n"],
             b["accepted"]["mean"]] for b in found["bins"]]  # fmt: skip
    rows.append(["all", found["positions"], found["confidence"], found["agreement"], None, None])
    return Table(f"calibration of the drafter: expected error {found['error']:.3f}", columns, rows)


def times_table(result: ResultDict) -> Table:
    """Times between tokens, in milliseconds."""
    ways = {way: own for way, own in result["latency"].items() if own["inter_token"]}
    seconds = {f"{told}, {NAMES[way]}": [own[name].get(statistic) for statistic in STATISTICS]
               for name, told in TIMES.items() for way, own in ways.items()}  # fmt: skip
    if ways:
        seconds |= {told: [result["cost"][name], None, None, None, None] for name, told in READING.items()}
    rows: list[list[CellValue]] = [[told, *(value and value * 1e3 for value in values)]
                                   for told, values in seconds.items() if {*values} != {None}]  # fmt: skip
    columns = table_columns(("milliseconds", "text"), *((name, 1) for name in STATISTICS))
    return Table("times between tokens", columns, rows)


def rates_table(result: ResultDict) -> Table:
    """Tokens per second by the rows of a call, or by the rate at which requests arrived."""
    by_rate = [(f"{entry['rate']:g}/s" if entry["rate"] else "-", entry["decoders"])
               for entry in result["latency_by_rate"]
               if entry["decoders"]["speculative"]["tokens_per_second"] is not None]  # fmt: skip
    by_rows = [(" to ".join(map(str, sorted({own["rows_from"], own["rows_to"]}))), own)
               for own in result["throughput_by_rows"]]  # fmt: skip
    columns = table_columns(("arrivals" if by_rate else "rows of a call", "text"))
    for told in NAMES.values():
        columns += table_columns(("tokens/s", 1), ("a user's", 1), group=told)
    rates = ("tokens_per_second", "user_tokens_per_second")
    rows = [
        [name, *((own[way] or {}).get(rate) for way in NAMES for rate in rates)] for name, own in by_rate or by_rows
    ]
    return Table("tokens per second of all requests, and that one user sees", columns, rows)


TABLES: dict[str, Callable[[ResultDict], Table]] = {
    "positions": positions_table,
    "lengths": lengths_table,
    "classes": classes_table,
    "entropy": entropy_table,
    "calibration": calibration_table,
    "times": times_table,
    "rows": rates_table,
}
