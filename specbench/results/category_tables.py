"""Tables of speedup and mean accepted tokens by category of prompts: of one run, or of many side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specbench.results.fields import at
from specbench.results.table import CellValue, Column, Table

OVERALL = "overall"
SPEEDUPS = {"measured": "speedup", "end_to_end": "speedup with prefill", "geometric_mean": "geometric mean of speedups"}
PATHS = {"measured": ("speedup/measured", "speedup/ci95"),
         "end_to_end": ("speedup/end_to_end", "speedup/end_to_end_ci95"),
         "geometric_mean": ("speedup/geometric_mean/mean", "speedup/geometric_mean/ci95")}  # fmt: skip
CategoryDict = Mapping[str, Any]  # `CategoryNumbers`, or nothing


@dataclass
class Entry:
    """One or several runs: what names them, their numbers by category, and those of all prompts."""

    names: Mapping[str, str]  # {"drafter": "ngram"}
    overall: CategoryDict
    categories: Mapping[str, CategoryDict] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The names in one."""
        return " ".join(self.names.values())

    def of(self, category: str) -> CategoryDict:
        """The numbers of a category; none if it has none."""
        return self.overall if category == OVERALL else self.categories.get(category, {})

    def pair(self, category: str, kind: str) -> list[CellValue]:
        """Mean accepted tokens and speedup of a category."""
        return [at(self.of(category), "block_efficiency/mean"), at(self.of(category), PATHS[kind][0])]


def overall_numbers(result: Mapping[str, Any]) -> CategoryDict:
    """The numbers of all prompts of a run."""
    rates = {name: result["throughput"][f"{way}_tokens_per_second"] for name, way in
             (("tokens_per_second", "speculative"), ("baseline_tokens_per_second", "baseline"))}  # fmt: skip
    counts = {name: result["counts"][name] for name in ("prompts", "tokens", "rounds")}
    return counts | rates | {name: result[name] for name in ("block_efficiency", "alpha", "speedup")}


def categories_of(entries: Sequence[Entry]) -> list[str]:
    """All categories that some entry has, in order; OVERALL is the last one."""
    return [*dict.fromkeys(name for entry in entries for name in entry.categories), OVERALL]


def entry_table(entry: Entry, title: str) -> Table:
    """A row for each category of one entry, with all that is known of it."""
    columns = [Column("category", digits=None), Column("requests", digits=0), Column("MAT"), Column("alpha", digits=3)]
    columns += [Column("speedup", unit="x"), Column("95 %", ends=True), Column("geo. mean", unit="x")]
    columns += [Column("tokens/s", digits=1), Column("plain", digits=1)]
    paths = ("prompts", "block_efficiency/mean", "alpha/mean", *PATHS["measured"], PATHS["geometric_mean"][0],
             "tokens_per_second", "baseline_tokens_per_second")  # fmt: skip
    rows = [[name, *(at(entry.of(name), path) for path in paths)] for name in categories_of([entry])]
    return Table(title, columns, rows)


def entries_table(entries: Sequence[Entry], title: str, kind: str) -> Table:
    """A row for each entry, and for each category its mean accepted tokens and speedup."""
    keys, categories = list(dict.fromkeys(key for entry in entries for key in entry.names)), categories_of(entries)
    columns = [Column(key, digits=None) for key in keys]
    for name in categories:
        columns += [Column("MAT", name), Column("speedup", name, unit="x")]
    columns += [Column("95 %", OVERALL, ends=True), Column("tokens/s", OVERALL, 1)]
    rows: list[list[CellValue]] = []
    for entry in entries:
        pairs = [value for name in categories for value in entry.pair(name, kind)]
        last = [at(entry.overall, PATHS[kind][1]), entry.overall["tokens_per_second"]]
        rows.append([*(entry.names.get(key, "-") for key in keys), *pairs, *last])
    return Table(title, columns, rows, names=len(keys))


def categories_table(entries: Sequence[Entry], title: str, kind: str) -> Table:
    """A row for each category, and for each entry its mean accepted tokens and speedup."""
    columns = [Column("category", digits=None)]
    for entry in entries:
        columns += [Column("MAT", entry.label), Column("speedup", entry.label, unit="x")]
    rows: list[list[CellValue]] = [[name, *(value for entry in entries for value in entry.pair(name, kind))]
                               for name in categories_of(entries)]  # fmt: skip
    return Table(title, columns, rows)
