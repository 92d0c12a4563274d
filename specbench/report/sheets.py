"""Tables of numbers as text for a terminal, Markdown, LaTeX (booktabs) or CSV."""

import csv
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from io import StringIO
from itertools import groupby
from typing import Any

from specbench.results import Interval
from specbench.visible import visible

Value = str | float | Interval | list[float]  # an interval is a tuple, or as JSON has it a list
GAP = 2  # characters between columns of text
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


def to_text(sheet: Sheet, width: int) -> str:
    """The table in lines of at most `width` characters: columns that do not fit follow below, with the names of the
    rows again. A group of columns stays together."""
    sheet = sheet.to_read()
    cells = [[visible(cell(value, column)) for value, column in zip(row, sheet.columns, strict=True)]
             for row in sheet.rows]  # fmt: skip
    widths = [max([len(visible(c.name)), *(len(row[i]) for row in cells)]) for i, c in enumerate(sheet.columns)]
    blocks = [_block(sheet.columns, cells, widths, numbers) for numbers in _blocks(sheet, widths, width)]
    return "\n\n".join(["\n".join([_wrapped(sheet.title, width), *blocks[:1]]), *blocks[1:]]) + _notes(sheet, width)


def _blocks(sheet: Sheet, widths: list[int], width: int) -> list[list[int]]:
    """The numbers of the columns of each block; widens the last column of a group whose heading is longer."""
    columns, names = sheet.columns, list(range(sheet.names))
    groups = [[i for i, _ in some] for _, some in groupby(list(enumerate(columns))[sheet.names :], key=_group_key)]
    blocks = [[*names]]
    for group in groups:
        own = sum(widths[i] + GAP for i in group)
        if missing := max(0, len(visible(columns[group[0]].group)) - (own - GAP)):
            widths[group[-1]] += missing
        used = sum(widths[i] + GAP for i in blocks[-1]) - GAP
        if len(blocks[-1]) > len(names) and used + own + missing > width:
            blocks.append([*names])
        blocks[-1] += group
    return blocks


def _group_key(numbered: tuple[int, Column]) -> Any:
    number, column = numbered
    return column.group or number


def _block(columns: Sequence[Column], cells: Sequence[Sequence[str]], widths: Sequence[int], numbers: list[int]) -> str:
    """Some columns as lines: headings, a rule, the rows."""
    lines = []
    if any(columns[i].group for i in numbers):
        spans = [[i for i, _ in some] for _, some in groupby([(i, columns[i]) for i in numbers], key=_group_key)]
        heads = [visible(columns[span[0]].group).center(sum(widths[i] for i in span) + GAP * (len(span) - 1))
                 for span in spans]  # fmt: skip
        lines.append((" " * GAP).join(heads).rstrip())
    lines.append(_line([visible(columns[i].name) for i in numbers], columns, widths, numbers))
    lines.append((" " * GAP).join("-" * widths[i] for i in numbers))
    return "\n".join([*lines, *(_line([row[i] for i in numbers], columns, widths, numbers) for row in cells)])


def _line(texts: Sequence[str], columns: Sequence[Column], widths: Sequence[int], numbers: Sequence[int]) -> str:
    """Names to the left, numbers to the right."""
    sides = (text.ljust(widths[i]) if columns[i].digits is None else text.rjust(widths[i])
             for text, i in zip(texts, numbers, strict=True))  # fmt: skip
    return (" " * GAP).join(sides).rstrip()


def _notes(sheet: Sheet, width: int) -> str:
    return "".join(f"\n{_wrapped(f'note: {note}', width)}" for note in sheet.notes)


def _wrapped(text: str, width: int) -> str:
    lines = [""]
    for word in visible(text).split(" "):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)


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
    lines += [f"{' & '.join(latex(c.name) for c in sheet.columns)} \\\\", "\\midrule"]
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
    if text.startswith("-") and text != "-":
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


FORMATS: dict[str, Callable[[Sheet], str]] = {"markdown": to_markdown, "latex": to_latex, "csv": to_csv}  # and text
