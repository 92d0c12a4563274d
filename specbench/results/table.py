"""A table: columns and rows of values, shown in a terminal, as Markdown, LaTeX (booktabs) or CSV, or on a page."""

import csv
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from io import StringIO
from itertools import compress, groupby
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from specbench.errors import visible
from specbench.results.terminal import NUMERIC, columns_that_fit, drawn, width_of
from specbench.results.wording import p_value
from specbench.stats.estimates import Interval

NOTHING = ("None", "-", "")  # of values, as text
NAMES_SHARE = 0.5  # of a terminal's width, at most, for the columns that name a row; wider ones become numbers
LATEX = str.maketrans({"\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#",
                       "%": r"\%", "_": r"\_", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
                       "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}",
                       '"': r"\textquotedbl{}"})  # fmt: skip
MARKDOWN = str.maketrans({"\\": "\\\\", "|": "\\|", "*": "\\*", "_": "\\_", "`": "\\`", "<": "&lt;", "[": "\\["})


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
    unit: str = ""  # "x" or "%" behind each number; "%" also multiplies by 100; "p" is none: the number is a p-value
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
        if isinstance(value, (str, Cell)):
            return str(value)
        if value is None or not math.isfinite(value):
            return "-"
        if self.unit == "p":
            return p_value(value)
        return f"{value * 100 if self.unit == '%' else value:,.{self.digits or 0}f}{self.unit}"


_LOOKS: dict[str, dict[str, Any]] = {"text": {"digits": None}, "x": {"unit": "x"}, "%": {"digits": 1, "unit": "%"},
                                     "interval": {"ends": True}, "p": {"unit": "p"}}  # fmt: skip


def table_columns(*forms: tuple[str, int | str], group: str = "") -> list[Column]:
    """Columns by name and form: a number of digits, "text", "x", "%", "p" or "interval"."""
    return [
        Column(name, group, **({"digits": form} if isinstance(form, int) else _LOOKS[form])) for name, form in forms
    ]


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
        order = sorted(headings, key=lambda heading: heading not in names)
        values: list[list[CellValue]] = [[row.get(heading) for heading in order] for row in rows]
        columns = table_columns(*((heading, "text") for heading in order))
        return cls(title, columns, values, names=len(headings.keys() & {*names}), **more)

    @property
    def headings(self) -> list[str]:
        """What stands above the columns."""
        return [column.key for column in self.columns]

    @property
    def words(self) -> set[str]:
        """The headings of columns that hold words, which are aligned to the left."""
        return {column.key for row in self.page_rows() for column, cell in row if not NUMERIC.match(cell.text)}

    def to_read(self) -> "Table":
        """Without the columns that have no value in any row."""
        kept = [number < self.names or any(str(row[number]) not in NOTHING for row in self.rows)
                for number in range(len(self.columns))]  # fmt: skip
        rows = [list(compress(row, kept)) for row in self.rows]
        return replace(self, columns=list(compress(self.columns, kept)), rows=rows)

    def page_rows(self) -> Iterator[list[tuple[Column, Cell]]]:
        """The column and the cell of each value."""
        for row in self.rows:
            pairs = zip(self.columns, row, strict=True)
            yield [(column, value if isinstance(value, Cell) else Cell(column.text(value))) for column, value in pairs]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = self.to_read()
        yield Text("")
        yield Text(table.title, style="bold")
        cells = ([cell for _, cell in row] for row in table.page_rows())
        shown = [[Text(cell.text, "bold red" if cell.kind == "bad" else "") for cell in row] for row in cells]
        columns = {heading: [row[number] for row in shown] for number, heading in enumerate(table.headings)}
        names = {heading: columns.pop(heading) for heading in table.headings[: table.names]}
        if width_of(console, names) > NAMES_SHARE * options.max_width:
            for number, row in enumerate(zip(*names.values(), strict=True), 1):
                told = ", ".join(f"{name}={text}" for name, text in zip(names, row, strict=True) if text.plain != "-")
                yield Text(f"{number}: {told or 'without overrides'}", overflow="fold")
            names = {"#": [Text(str(number)) for number in range(1, len(shown) + 1)]}
        ranks = {heading: rank for rank, heading in enumerate(self.order)}
        by_rank = {heading: columns[heading] for heading in sorted(columns, key=lambda h: ranks.get(h, len(ranks)))}
        fits = columns_that_fit(console, options.max_width, names, by_rank, skips=bool(self.elsewhere))
        for taken in fits[:1] if self.elsewhere else fits:
            yield drawn(names | {heading: cells for heading, cells in columns.items() if heading in taken})
        if self.elsewhere and fits[1:]:
            left = [heading for taken in fits[1:] for heading in columns if heading in taken]
            yield Text(f"not shown, in {self.elsewhere}: {', '.join(left)}", style="dim")


def to_markdown(table: Table) -> str:
    """A table of GitHub's Markdown, the title above and notes below."""
    table = table.to_read()

    def escaped(text: str) -> str:
        return visible(text).translate(MARKDOWN)

    sides = [":--" if c.digits is None else "--:" for c in table.columns]
    rows = [[escaped(cell.text) for _, cell in row] for row in table.page_rows()]
    lines = [f"| {' | '.join(row)} |" for row in (map(escaped, table.headings), sides, *rows)]
    title = [f"**{escaped(table.title)}**", ""] if table.title else []
    return "\n".join([*title, *lines, *(f"\n{escaped(note)}" for note in table.notes)])


def to_latex(table: Table) -> str:
    r"""A tabular with booktabs' rules; the title and notes are comments. Groups of columns have a \cmidrule."""
    table = table.to_read()
    sides = "".join("l" if c.digits is None else "r" for c in table.columns)
    heads = [latex(c.name).replace("+-", r"$\pm$") for c in table.columns]
    rows = [[_latex_cell(v, c) for v, c in zip(row, table.columns, strict=True)] for row in table.rows]
    return "\n".join([
        *(f"% {visible(note)}" for note in (table.title, *table.notes)),
        "% \\usepackage{booktabs}", f"\\begin{{tabular}}{{{sides}}}", "\\toprule",
        *(_latex_groups(table) if any(c.group for c in table.columns) else ()),
        f"{' & '.join(heads)} \\\\", "\\midrule",
        *(f"{' & '.join(row)} \\\\" for row in rows),
        "\\bottomrule", "\\end{tabular}",
    ])  # fmt: skip


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
    return visible(text).translate(LATEX)


def _latex_cell(value: CellValue, column: Column) -> str:
    if isinstance(value, str):
        return latex(value)
    text = latex(column.text(value, "--"))
    if text.startswith("-"):
        text = "--" if text == "-" else f"${text}$"
    return text.replace("x", r"$\times$") if column.unit == "x" else text


def _inert(value: CellValue) -> Any:
    """A cell that a spreadsheet does not compute: a text that begins as a formula does begins with an apostrophe."""
    value = value.text if isinstance(value, Cell) else value
    if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")):
        with suppress(ValueError):
            float(value)
            return value
        return f"'{value}"
    return value


def to_csv(table: Table) -> str:
    """The numbers with all digits, an interval as two columns, without title and notes."""
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    keys = ((f"{c.key} low", f"{c.key} high") if c.ends else (c.key,) for c in table.columns)
    writer.writerow([_inert(key) for own in keys for key in own])
    for row in table.rows:
        cells: list[Any] = []
        for value, column in zip(row, table.columns, strict=True):
            cells += value if isinstance(value, (tuple, list)) else [_inert(value)] * (2 if column.ends else 1)
        writer.writerow(cells)
    return text.getvalue()


FORMATS: dict[str, Callable[[Table], str]] = {"markdown": to_markdown, "latex": to_latex, "csv": to_csv}
