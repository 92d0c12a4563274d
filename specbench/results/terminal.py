"""Prints to the terminal what fits its width: tables whose cells are never cut."""

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import rich.table
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.text import Text

from specbench.errors import Visible

WIDTH = 140  # characters, where the output is not a terminal
LONGEST_WORD = 12  # characters of a heading; a longer one is broken at its dots and underscores
NUMERIC = re.compile(r"$|(x|<|\+|-|< )?\.?\d[\d.,]*(\W|[ex]|$)|-$|too few|unknown")  # how a number, or its lack, begins
ColumnCells = Mapping[str, Sequence[Text]]  # cells by heading


def show(*renderables: Any) -> None:
    """Prints to the terminal; if the output is none, $COLUMNS or else `WIDTH` characters wide."""
    console = Console(markup=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(markup=False, emoji=False, width=WIDTH)
    for renderable in renderables:
        console.print(Visible(renderable), crop=False)  # lines to copy are whole


def columns_that_fit(
    console: Console, width: int, names: ColumnCells, columns: ColumnCells, skips: bool
) -> list[ColumnCells]:
    """The columns of as many tables as are needed, all beginning with `names`: one more column at least, however
    narrow the terminal is. With `skips`, a column that does not fit does not end a table."""
    tables: list[ColumnCells] = []
    left = dict(columns)
    while left or not tables:
        taken: dict[str, Sequence[Text]] = {}
        for heading, cells in left.items():
            if not taken or width_of(console, {**names, **taken, heading: cells}) <= width:
                taken[heading] = cells
            elif not skips:
                break
        left = {heading: cells for heading, cells in left.items() if heading not in taken}
        tables.append(taken)
    return tables


def width_of(console: Console, columns: ColumnCells) -> int:
    """Characters that a table of these columns takes."""
    return Measurement.get(console, console.options.update(width=10**4), drawn(columns)).maximum if columns else 0


def drawn(columns: ColumnCells) -> rich.table.Table:
    """A table of Rich's, whose cells are never cut."""
    table = rich.table.Table(header_style="dim", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading, cells in columns.items():
        side: Any = "right" if all(NUMERIC.match(cell.plain) for cell in cells) else "left"
        lines = broken(heading, max(map(len, cells), default=0))
        table.add_column(Text(lines), justify=side, vertical="bottom", no_wrap=True)
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    return table


def broken(heading: str, width: int = 0) -> str:
    """A heading in lines, as few as do not widen a column of cells so wide: broken at spaces, and a long word after its
    dots and underscores."""
    words = re.split(r" (?!%)", heading)
    words = [re.sub(r"([._])(?=\w)", r"\1\n", word) if len(word) > LONGEST_WORD else word for word in words]
    width = max(width, *(len(part) for word in words for part in word.split("\n")))
    text = words[0]
    for word in words[1:]:
        line = f"{text} {word}".split("\n")[text.count("\n")]
        text += f" {word}" if len(line) <= width else f"\n{word}"
    return text
