"""Tables of speedup and mean accepted tokens by category of prompts: of one run, or of many side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specbench.results.export import Column, Sheet, Value

OVERALL = "overall"
SPEEDUPS = {"measured": "speedup", "end_to_end": "speedup with prefill", "geometric_mean": "geometric mean of speedups"}
Numbers = Mapping[str, Any]  # `CategoryNumbers`; what an earlier version did not write is missing


@dataclass
class Entry:
    """One or several runs: what names them, their numbers by category, and those of all prompts."""

    names: Mapping[str, str]  # {"drafter": "ngram"}
    overall: Numbers
    categories: Mapping[str, Numbers] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The names in one."""
        return " ".join(self.names.values())

    def of(self, category: str) -> Numbers:
        """The numbers of a category; none if it has none."""
        return self.overall if category == OVERALL else self.categories.get(category, {})


def whole(result: Mapping[str, Any]) -> Numbers:
    """The numbers of all prompts of a run."""
    rates, counts = result["throughput"], result["counts"]
    return {
        "prompts": counts["prompts"],
        "tokens": counts["tokens"],
        "rounds": counts["rounds"],
        "block_efficiency": result["block_efficiency"],
        "alpha": result["alpha"],
        "speedup": result["speedup"],
        "tokens_per_second": rates["speculative_tokens_per_second"],
        "baseline_tokens_per_second": rates["baseline_tokens_per_second"],
    }


def speedup_of(numbers: Numbers, kind: str) -> tuple[Value, Value]:
    """A speedup and its interval; None where there is none."""
    found = numbers.get("speedup") or {}
    if kind == "geometric_mean":
        found = found.get(kind) or {}
        return found.get("mean"), found.get("ci95")
    return found.get(kind), found.get("ci95" if kind == "measured" else f"{kind}_ci95")


def categories_of(entries: Sequence[Entry]) -> list[str]:
    """All categories that some entry has, in order; OVERALL is the last one."""
    return [*dict.fromkeys(name for entry in entries for name in entry.categories), OVERALL]


def of_one(entry: Entry, title: str) -> Sheet:
    """A row for each category of one entry, with all that is known of it."""
    columns = [Column("category", digits=None), Column("requests", digits=0), Column("MAT"), Column("alpha", digits=3)]
    columns += [Column("speedup", unit="x"), Column("95 %", ends=True), Column("geo. mean", unit="x")]
    columns += [Column("tokens/s", digits=1), Column("plain", digits=1)]
    rows = []
    for name in categories_of([entry]):
        found = entry.of(name)
        row = [name, found.get("prompts"), _mean(found, "block_efficiency"), _mean(found, "alpha")]
        row += [*speedup_of(found, "measured"), speedup_of(found, "geometric_mean")[0]]
        rows.append([*row, found.get("tokens_per_second"), found.get("baseline_tokens_per_second")])
    return Sheet(title, columns, rows)


def side_by_side(entries: Sequence[Entry], title: str, kind: str) -> Sheet:
    """A row for each entry, and for each category its mean accepted tokens and speedup."""
    keys = list(dict.fromkeys(key for entry in entries for key in entry.names))
    columns = [Column(key, digits=None) for key in keys]
    for name in categories_of(entries):
        columns += [Column("MAT", name), Column("speedup", name, unit="x")]
    columns += [Column("95 %", OVERALL, ends=True), Column("tokens/s", OVERALL, 1)]
    rows: list[list[Value]] = []
    for entry in entries:
        row: list[Value] = [entry.names.get(key, "-") for key in keys]
        for name in categories_of(entries):
            row += [_mean(entry.of(name), "block_efficiency"), speedup_of(entry.of(name), kind)[0]]
        rows.append([*row, speedup_of(entry.overall, kind)[1], entry.overall.get("tokens_per_second")])
    return Sheet(title, columns, rows, names=len(keys))


def turned(entries: Sequence[Entry], title: str, kind: str) -> Sheet:
    """A row for each category, and for each entry its mean accepted tokens and speedup."""
    columns = [Column("category", digits=None)]
    for entry in entries:
        columns += [Column("MAT", entry.label), Column("speedup", entry.label, unit="x")]
    rows: list[list[Value]] = []
    for name in categories_of(entries):
        row: list[Value] = [name]
        for entry in entries:
            row += [_mean(entry.of(name), "block_efficiency"), speedup_of(entry.of(name), kind)[0]]
        rows.append(row)
    return Sheet(title, columns, rows)


def _mean(numbers: Numbers, name: str) -> Value:
    found: Value = (numbers.get(name) or {}).get("mean")
    return found
