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
NUMBER = "#"  # the heading of rows that are numbered, where their names would take too much room
LONGEST_WORD = 12  # characters of a heading; a longer one is broken at its dots and underscores
NUMERIC = re.compile(r"-|[-+<x.]*\d|too few|unknown")  # how a number, an interval or the lack of one begins
StyledRows = Sequence[Mapping[str, tuple[str, str]]]  # by heading a text and its style


def show(*renderables: Any) -> None:
    """Prints to the terminal; if the output is none, $COLUMNS or else `WIDTH` characters wide."""
    console = Console(markup=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(markup=False, emoji=False, width=WIDTH)
    for renderable in renderables:
        console.print(Visible(renderable))


def columns_that_fit(console: Console, width: int, names: list[str], headings: Sequence[str], rows: StyledRows,
                     skips: bool) -> list[list[str]]:  # fmt: skip
    """The columns of as many tables as are needed, all beginning with `names`: one more column at least, however
    narrow the terminal is. With `skips`, a column that does not fit does not end a table."""
    tables: list[list[str]] = []
    left = [*headings]
    while left or not tables:
        taken: list[str] = []
        for heading in left:
            if not taken or width_of(console, [*names, *taken, heading], rows) <= width:
                taken.append(heading)
            elif not skips:
                break
        left = [heading for heading in left if heading not in taken]
        tables.append(taken)
    return tables


def width_of(console: Console, headings: Sequence[str], rows: StyledRows) -> int:
    """Characters that a table of these columns takes."""
    if not headings:
        return 0
    return Measurement.get(console, console.options.update(width=10**4), drawn(headings, rows)).maximum


def drawn(headings: Sequence[str], rows: StyledRows) -> rich.table.Table:
    """A table of Rich's, whose cells are never cut."""
    table = rich.table.Table(header_style="dim", box=SIMPLE_HEAD)
    table.padding, table.pad_edge = (0, 1, 0, 0), False
    for heading in headings:
        texts = [row[heading][0] for row in rows]
        named = not all(NUMERIC.match(text) for text in texts)
        told = broken(heading, max(map(len, texts), default=0))
        table.add_column(Text(told), justify="left" if named else "right", vertical="bottom", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(row[heading][0], style=row[heading][1]) for heading in headings))
    return table


def broken(heading: str, width: int = 0) -> str:
    """A heading in lines, as few as do not widen a column of cells so wide: broken at spaces, and a long word after its
    dots and underscores."""
    words = re.split(r" (?!%)", heading)
    words = [re.sub(r"([._])(?=\w)", r"\1\n", word) if len(word) > LONGEST_WORD else word for word in words]
    width = max(width, *(len(part) for word in words for part in word.split("\n")))
    lines = words[:1]
    for word in words[1:]:
        if len(lines[-1].rpartition("\n")[2]) + 1 + len(word.partition("\n")[0]) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return "\n".join(lines)
