"""Tables of a page, whose cells may link, fold a text and sort by a number of their own."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

NUMBER = re.compile(r"(x|<|\+|-|< )?\.?\d[\d.,]*(\W|[ex]|$)|-$")  # how a cell of numbers begins


@dataclass(frozen=True)
class Cell:
    """A cell: its text, where it leads to, what it sorts by instead of its text, texts that it folds by name."""

    text: str
    link: str = ""
    sort: float | None = None
    folded: Mapping[str, str] = field(default_factory=dict)
    kind: str = ""  # "good", "bad" or "dim"

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class PageTable:
    """A table: rows by heading, in the order of the headings of all rows. `sorts`: a browser sorts and filters it."""

    rows: Sequence[Mapping[str, Any]]
    caption: str = ""
    sorts: bool = False
    notes: Mapping[str, str] = field(default_factory=dict)  # what a heading means

    @property
    def headings(self) -> list[str]:
        return list(dict.fromkeys(heading for row in self.rows for heading in row))

    @property
    def words(self) -> set[str]:
        """The headings of columns that hold words, which are aligned to the left."""
        return {
            heading
            for heading in self.headings
            if not all(NUMBER.match(str(row[heading])) for row in self.rows if heading in row and str(row[heading]))
        }

    def cells(self, row: Mapping[str, Any]) -> list[tuple[str, Cell]]:
        """The heading and the cell of each column."""
        found = [(heading, row.get(heading, "-")) for heading in self.headings]
        return [(heading, cell if isinstance(cell, Cell) else Cell(shown(cell))) for heading, cell in found]


def shown(value: Any) -> str:
    """A value of a result as text; an estimate with its standard error."""
    if isinstance(value, dict):
        error = "" if value.get("stderr") is None else f" ± {value['stderr']:.3f}"
        return "-" if value.get("mean") is None else f"{value['mean']:.3f}{error}"
    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value is None else str(value)


def without_empty(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows without columns that have nothing in them, in the order of the first row that has each."""
    headings = dict.fromkeys(heading for row in rows for heading in row)
    kept = [h for h in headings if any(str(row.get(h, "-")) not in ("-", "", "None") for row in rows)]
    return [{heading: row.get(heading, "-") for heading in kept} for row in rows]
