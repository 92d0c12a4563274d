"""A table that fits the terminal: columns that do not fit stand in a further table or are left out, never cut."""

import re
from collections.abc import Iterator, Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

NUMBER = "#"  # the heading of rows that are numbered, where their names would take too much room
NAMES_SHARE = 0.5  # of the width, at most, for the columns that name a row
LONGEST_WORD = 12  # characters of a heading; a longer one is broken at its dots and underscores
NUMERIC = re.compile(r"-|[-+<x.]*\d|too few|unknown")  # how a number, an interval or the lack of one begins
Row = Mapping[str, str]


class Grid:
    """One row per entry, a column for each of the headings. `names` are those that say which row it is: every table
    has them, or numbers with a list of what they stand for. Other columns that do not fit go into further tables; or,
    if `elsewhere` says in which file they are, are left out, the last ones in `order` first."""

    def __init__(
        self,
        rows: Sequence[Row],
        headings: Sequence[str],
        title: str,
        names: Sequence[str] = (),
        order: Sequence[str] = (),
        elsewhere: str = "",
    ):
        self.rows, self.title, self.elsewhere = rows, title, elsewhere
        self.names = [heading for heading in headings if heading in names]
        self.others = [heading for heading in headings if heading not in names]
        self.order = sorted(self.others, key=lambda h: order.index(h) if h in order else len(order))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text("")
        yield Text(self.title, style="bold")
        names, rows = self.names, self.rows
        if self._width(console, names, rows) > NAMES_SHARE * options.max_width:
            yield from self._legend()
            names, rows = [NUMBER], [{**row, NUMBER: str(place)} for place, row in enumerate(rows, 1)]
        tables = [*self._split(console, options.max_width, names, rows)]
        for headings in tables[:1] if self.elsewhere else tables:
            yield _table([*names, *headings], rows)
        left_out = [heading for headings in tables[1:] for heading in headings] if self.elsewhere else []
        if left_out:
            yield Text(f"not shown, in {self.elsewhere}: {', '.join(left_out)}", style="dim")

    def _split(self, console: Console, width: int, names: list[str], rows: Sequence[Row]) -> Iterator[list[str]]:
        """The columns of each table, in the order of the headings; one at least, however narrow the terminal is."""
        left = [*self.order] if self.elsewhere else [*self.others]
        if not left:
            yield []
        while left:
            taken: list[str] = []
            for heading in left:
                if not taken or self._width(console, [*names, *taken, heading], rows) <= width:
                    taken.append(heading)
                elif not self.elsewhere:
                    break
            left = [heading for heading in left if heading not in taken]
            yield [heading for heading in self.others if heading in taken]

    def _legend(self) -> Iterator[Text]:
        """What the numbers of the rows stand for."""
        for place, row in enumerate(self.rows, 1):
            told = ", ".join(f"{name}={row[name]}" for name in self.names if row.get(name, "-") != "-")
            yield Text(f"{place}: {told or 'without overrides'}", overflow="fold")

    @staticmethod
    def _width(console: Console, headings: Sequence[str], rows: Sequence[Row]) -> int:
        if not headings:
            return 0
        wide = console.options.update(width=10**4)
        return Measurement.get(console, wide, _table(headings, rows)).maximum


def _table(headings: Sequence[str], rows: Sequence[Row]) -> Table:
    table = Table(header_style="dim", box=SIMPLE_HEAD)
    table.padding, table.pad_edge = (0, 1, 0, 0), False
    for heading in headings:
        named = any(not NUMERIC.match(row.get(heading, "-")) for row in rows)
        told = broken(heading, max(len(row.get(heading, "-")) for row in rows))
        table.add_column(Text(told), justify="left" if named else "right", vertical="bottom", no_wrap=True)
    for row in rows:
        table.add_row(*(_cell(heading, row.get(heading, "-")) for heading in headings))
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


def _cell(heading: str, text: str) -> Text:
    """A cell as it stands, red for a verdict that is not good."""
    return Text(text, style="bold red" if heading == "lossless" and text not in ("yes", "no") else "")
