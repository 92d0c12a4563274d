"""A table: columns and rows of values, shown in a terminal, as Markdown, LaTeX (booktabs) or CSV, or on a page."""

import csv
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import StringIO
from itertools import groupby
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from specbench.errors import visible
from specbench.results.terminal import NUMBER, columns_that_fit, drawn, width_of
from specbench.stats.estimates import Interval

NUMERIC = re.compile(r"(x|<|\+|-|< )?\.?\d[\d.,]*(\W|[ex]|$)|-$|too few|unknown")  # how a number, or its lack, begins
NOTHING = ("None", "-", "")  # of values, as text
NAMES_SHARE = 0.5  # of a terminal's width, at most, for the columns that name a row
LATEX = {"\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "%": r"\%", "_": r"\_",
         "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
         "|": r"\textbar{}", '"': r"\textquotedbl{}"}  # fmt: skip
MARKDOWN = {"\\": "\\\\", "|": "\\|", "*": "\\*", "_": "\\_", "`": "\\`", "<": "&lt;", "[": "\\["}


@dataclass(frozen=True)
class Cell:
    """A text that has more on a page: where it leads to, texts that it folds by name, and its look."""

    text: str
    link: str = ""
    folded: Mapping[str, str] = field(default_factory=dict)
    kind: str = ""  # "good", "bad" or "dim"

    def __str__(self) -> str:
        return self.text


CellValue = str | float | Interval | list[float] | Cell  # an interval is a tuple, or as JSON has it a list


@dataclass(frozen=True)
class Column:
    """A column of numbers, or of texts (`digits` None). Columns next to each other with one `group` share a heading."""

    name: str
    group: str = ""
    digits: int | None = 2
    unit: str = ""  # "x" or "%" behind each number; "%" also multiplies by 100
    ends: bool = False  # whether its values are intervals
    about: str = ""  # what the heading means

    @property
    def key(self) -> str:
        """The heading in one."""
        return f"{self.group} {self.name}".strip()

    def text(self, value: CellValue, dash: str = "-") -> str:
        """A value as text; "-" for none, and `dash` between the ends of an interval."""
        if isinstance(value, (tuple, list)):
            return dash.join(self.text(end) for end in value)
        if value is None or isinstance(value, (str, Cell)):
            return "-" if value is None else str(value)
        if not math.isfinite(value):
            return "-"
        return f"{value * 100 if self.unit == '%' else value:,.{self.digits or 0}f}{self.unit}"


@dataclass
class Table:
    """For each row a value of each column. The first `names` columns name the row; notes stand below. Columns that a
    terminal has no room for go into further tables or, if `elsewhere` says in which file they are, are left out, the
    last ones in `order` first."""

    title: str
    columns: list[Column]
    rows: list[list[CellValue]]
    notes: list[str] = field(default_factory=list)
    names: int = 1
    order: Sequence[str] = ()
    elsewhere: str = ""
    sorts: bool = False  # whether a browser sorts and filters it

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]], title: str = "", names: Sequence[str] = (), **more: Any) -> "Table":
        """A table of texts by heading, in the order of the headings of all rows; those in `names` come first."""
        headings = dict.fromkeys(heading for row in rows for heading in row)
        first = [heading for heading in headings if heading in names]
        order = [*first, *(heading for heading in headings if heading not in names)]
        values: list[list[CellValue]] = [[row.get(heading) for heading in order] for row in rows]
        return cls(title, [Column(heading, digits=None) for heading in order], values, names=len(first), **more)

    @property
    def headings(self) -> list[str]:
        """What stands above the columns."""
        return [column.key for column in self.columns]

    @property
    def words(self) -> set[str]:
        """The headings of columns that hold words, which are aligned to the left."""
        texts = zip(*self.texts(), strict=True)
        return {head for head, own in zip(self.headings, texts, strict=False) if not all(map(_numeric, own))}

    def texts(self, dash: str = "-") -> list[list[str]]:
        """The rows as text."""
        return [[c.text(value, dash) for value, c in zip(row, self.columns, strict=True)] for row in self.rows]

    def to_read(self) -> "Table":
        """Without the columns that have no value in any row."""
        numbers = range(len(self.columns))
        kept = [i for i in numbers if i < self.names or any(str(row[i]) not in NOTHING for row in self.rows)]
        return replace(
            self, columns=[self.columns[i] for i in kept], rows=[[row[i] for i in kept] for row in self.rows]
        )

    def page_rows(self) -> Iterator[list[tuple[Column, Cell]]]:
        """The column and the cell of each value, for the template of a page."""
        for row, texts in zip(self.rows, self.texts(), strict=True):
            cells = (value if isinstance(value, Cell) else Cell(text) for value, text in zip(row, texts, strict=True))
            yield list(zip(self.columns, cells, strict=True))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = self.to_read()
        yield Text("")
        yield Text(table.title, style="bold")
        styles = [["bold red" if isinstance(v, Cell) and v.kind == "bad" else "" for v in row] for row in table.rows]
        pairs = [list(zip(*both, strict=True)) for both in zip(table.texts(), styles, strict=True)]
        rows = [dict(zip(table.headings, own, strict=True)) for own in pairs]
        names, others = table.headings[: table.names], table.headings[table.names :]
        if width_of(console, names, rows) > NAMES_SHARE * options.max_width:
            for place, row in enumerate(rows, 1):
                told = ", ".join(f"{name}={row[name][0]}" for name in names if row[name][0] != "-")
                yield Text(f"{place}: {told or 'without overrides'}", overflow="fold")
                row[NUMBER] = (str(place), "")
            names = [NUMBER]
        first = sorted(others, key=lambda h: self.order.index(h) if h in self.order else len(self.order))
        fits = columns_that_fit(console, options.max_width, names, first if self.elsewhere else others, rows,
                                skips=bool(self.elsewhere))  # fmt: skip
        for headings in fits[:1] if self.elsewhere else fits:
            yield drawn([*names, *(heading for heading in others if heading in headings)], rows)
        if self.elsewhere and fits[1:]:
            left = [heading for own in fits[1:] for heading in others if heading in own]
            yield Text(f"not shown, in {self.elsewhere}: {', '.join(left)}", style="dim")


def _numeric(text: str) -> bool:
    return not text or bool(NUMERIC.match(text))


def to_markdown(table: Table) -> str:
    """A table of GitHub's Markdown, the title above and notes below."""
    table = table.to_read()

    def escaped(text: str) -> str:
        return _escaped(visible(text), MARKDOWN)

    heads = [escaped(heading) for heading in table.headings]
    sides = [":--" if c.digits is None else "--:" for c in table.columns]
    rows = [[escaped(text) for text in row] for row in table.texts()]
    lines = [f"| {' | '.join(row)} |" for row in (heads, sides, *rows)]
    title = [f"**{escaped(table.title)}**", ""] if table.title else []
    return "\n".join([*title, *lines, *(f"\n{escaped(note)}" for note in table.notes)])


def to_latex(table: Table) -> str:
    r"""A tabular with booktabs' rules; the title and notes are comments. Groups of columns have a \cmidrule."""
    table = table.to_read()
    sides = "".join("l" if c.digits is None else "r" for c in table.columns)
    lines = [f"% {visible(note)}" for note in (table.title, *table.notes)]
    lines += ["% \\usepackage{booktabs}", f"\\begin{{tabular}}{{{sides}}}", "\\toprule"]
    if any(c.group for c in table.columns):
        lines += _latex_groups(table)
    heads = [latex(c.name).replace("+-", r"$\pm$") for c in table.columns]
    lines += [f"{' & '.join(heads)} \\\\", "\\midrule"]
    for row in table.rows:
        lines.append(f"{' & '.join(_latex_cell(v, c) for v, c in zip(row, table.columns, strict=True))} \\\\")
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}"])


def _latex_groups(table: Table) -> list[str]:
    """The line of headings that columns share, and the rules below them."""
    heads, rules = [], []
    for _, some in groupby(enumerate(table.columns, 1), key=lambda numbered: numbered[1].group or numbered[0]):
        span = list(some)
        first, last, group = span[0][0], span[-1][0], span[0][1].group
        heads.append(f"\\multicolumn{{{len(span)}}}{{c}}{{{latex(group)}}}" if group else "")
        rules += [f"\\cmidrule(lr){{{first}-{last}}}"] if group else []
    return [f"{' & '.join(heads)} \\\\", " ".join(rules)]


def latex(text: str) -> str:
    """A text with the characters escaped that LaTeX gives a meaning to; what does not print is shown."""
    return _escaped(visible(text), LATEX)


def _latex_cell(value: CellValue, column: Column) -> str:
    if isinstance(value, str):
        return latex(value)
    text = latex(column.text(value, "--"))
    if text == "-":
        return "--"
    if text.startswith("-"):
        text = f"${text}$"
    return text.replace("x", r"$\times$") if column.unit == "x" else text


def to_csv(table: Table) -> str:
    """The numbers with all digits, an interval as two columns, without title and notes."""
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    keys = ((f"{c.key} low", f"{c.key} high") if c.ends else (c.key,) for c in table.columns)
    writer.writerow([key for own in keys for key in own])
    for row in table.rows:
        cells: list[Any] = []
        for value, column in zip(row, table.columns, strict=True):
            cells += value if isinstance(value, (tuple, list)) else [value] * (2 if column.ends else 1)
        writer.writerow(cells)
    return text.getvalue()


def _escaped(text: str, table: dict[str, str]) -> str:
    return "".join(table.get(character, character) for character in text)


FORMATS: dict[str, Callable[[Table], str]] = {"markdown": to_markdown, "latex": to_latex, "csv": to_csv}
