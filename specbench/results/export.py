"""Tables of numbers for a terminal, or as Markdown, LaTeX (booktabs) or CSV."""

import csv
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from io import StringIO
from itertools import groupby
from typing import Any

from specbench.errors import visible
from specbench.results.terminal_table import Grid
from specbench.stats.estimates import Interval

Value = str | float | Interval | list[float]  # an interval is a tuple, or as JSON has it a list
LATEX = {"\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "%": r"\%", "_": r"\_",
         "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
         "|": r"\textbar{}", '"': r"\textquotedbl{}"}  # fmt: skip
MARKDOWN = {"\\": "\\\\", "|": "\\|", "*": "\\*", "_": "\\_", "`": "\\`", "<": "&lt;", "[": "\\["}


@dataclass(frozen=True)
class Column:
    """A column of numbers, or of names (`digits` None). Columns next to each other with one `group` share a heading."""

    name: str
    group: str = ""
    digits: int | None = 2
    unit: str = ""  # "x" or "%" behind each number; "%" also multiplies by 100
    ends: bool = False  # whether its values are intervals

    @property
    def key(self) -> str:
        """The heading in CSV."""
        return f"{self.group} {self.name}".strip()


@dataclass
class Sheet:
    """A table: for each row a value of each column. The first `names` columns name the row. Notes stand below."""

    title: str
    columns: list[Column]
    rows: list[list[Value]]
    notes: list[str] = field(default_factory=list)
    names: int = 1

    def to_read(self) -> "Sheet":
        """Without the columns that have no value in any row."""
        kept = [i for i in range(len(self.columns)) if i < self.names or any(row[i] is not None for row in self.rows)]
        rows = [[row[i] for i in kept] for row in self.rows]
        return Sheet(self.title, [self.columns[i] for i in kept], rows, self.notes, self.names)


def cell(value: Value, column: Column, dash: str = "-") -> str:
    """A value as text; "-" for none, and `dash` between the ends of an interval."""
    if isinstance(value, (tuple, list)):
        return dash.join(cell(end, column) for end in value)
    if value is None or isinstance(value, str):
        return "-" if value is None else value
    if not math.isfinite(value):
        return "-"
    scaled = value * 100 if column.unit == "%" else value
    return f"{scaled:,.{column.digits or 0}f}{column.unit}"


def to_grid(sheet: Sheet) -> Grid:
    """The table for a terminal, without its notes."""
    sheet = sheet.to_read()
    headings = [column.key for column in sheet.columns]
    cells = ([cell(value, column) for value, column in zip(row, sheet.columns, strict=True)] for row in sheet.rows)
    rows = [dict(zip(headings, row, strict=True)) for row in cells]
    return Grid(rows, headings, sheet.title, headings[: sheet.names])


def to_markdown(sheet: Sheet) -> str:
    """A table of GitHub's Markdown, the title above and notes below."""
    sheet = sheet.to_read()

    def escaped(text: str) -> str:
        return _escaped(visible(text), MARKDOWN)

    heads = [escaped(f"{c.group} {c.name}".strip()) for c in sheet.columns]
    sides = [":--" if c.digits is None else "--:" for c in sheet.columns]
    rows = [[escaped(cell(v, c)) for v, c in zip(row, sheet.columns, strict=True)] for row in sheet.rows]
    lines = [f"| {' | '.join(row)} |" for row in (heads, sides, *rows)]
    return "\n".join([f"**{escaped(sheet.title)}**", "", *lines, *(f"\n{escaped(note)}" for note in sheet.notes)])


def _group_key(numbered: tuple[int, Column]) -> Any:
    number, column = numbered
    return column.group or number


def to_latex(sheet: Sheet) -> str:
    r"""A tabular with booktabs' rules; the title and notes are comments. Groups of columns have a \cmidrule."""
    sheet = sheet.to_read()
    sides = "".join("l" if c.digits is None else "r" for c in sheet.columns)
    lines = [f"% {visible(note)}" for note in (sheet.title, *sheet.notes)]
    lines += ["% \\usepackage{booktabs}", f"\\begin{{tabular}}{{{sides}}}", "\\toprule"]
    if any(c.group for c in sheet.columns):
        heads, rules = [], []
        for _, some in groupby(enumerate(sheet.columns, 1), key=_group_key):
            span = list(some)
            first, last, group = span[0][0], span[-1][0], span[0][1].group
            heads.append(f"\\multicolumn{{{len(span)}}}{{c}}{{{latex(group)}}}" if group else "")
            rules += [f"\\cmidrule(lr){{{first}-{last}}}"] if group else []
        lines += [f"{' & '.join(heads)} \\\\", " ".join(rules)]
    heads = [latex(c.name).replace("+-", r"$\pm$") for c in sheet.columns]
    lines += [f"{' & '.join(heads)} \\\\", "\\midrule"]
    for row in sheet.rows:
        lines.append(f"{' & '.join(_latex_cell(v, c) for v, c in zip(row, sheet.columns, strict=True))} \\\\")
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}"])


def latex(text: str) -> str:
    """A text with the characters escaped that LaTeX gives a meaning to; what does not print is shown."""
    return _escaped(visible(text), LATEX)


def _latex_cell(value: Value, column: Column) -> str:
    if isinstance(value, str):
        return latex(value)
    text = latex(cell(value, column, "--"))
    if text == "-":
        return "--"
    if text.startswith("-"):
        text = f"${text}$"
    return text.replace("x", r"$\times$") if column.unit == "x" else text


def to_csv(sheet: Sheet) -> str:
    """The numbers with all digits, an interval as two columns, without title and notes."""
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([key for c in sheet.columns for key in ((f"{c.key} low", f"{c.key} high") if c.ends else (c.key,))])
    for row in sheet.rows:
        cells: list[str | float | None] = []
        for value, column in zip(row, sheet.columns, strict=True):
            if isinstance(value, (tuple, list)):
                cells += value
            else:
                cells += [None, None] if column.ends else [value]
        writer.writerow(cells)
    return text.getvalue().rstrip("\n")


def _escaped(text: str, table: dict[str, str]) -> str:
    return "".join(table.get(character, character) for character in text)


FORMATS: dict[str, Callable[[Sheet], str]] = {
    "markdown": to_markdown,
    "latex": to_latex,
    "csv": to_csv,
}  # and text, by `to_grid`
