"""The sections of a page, and how they become one HTML file and its figures."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup
from matplotlib.figure import Figure

from specbench.errors import visible
from specbench.results.atomic_files import write_text
from specbench.results.report.style import save_figure
from specbench.results.table import Table

LONGEST_NAME = 60  # characters of a figure's file name
PAGE = "report.html"


@dataclass(frozen=True)
class Drawing:
    """A figure of a page: the name of its files, what stands below it, and the function that makes it."""

    name: str
    caption: str
    make: Callable[[], Figure]


@dataclass
class Section:
    """A heading, and what stands below it: texts, figures (`grid`: side by side), tables, and texts whose tokens are
    marked."""

    title: str
    texts: Sequence[str] = ()
    figures: Sequence[Drawing] = ()
    tables: Sequence[Table] = ()
    samples: Sequence[dict[str, Any]] = ()
    grid: bool = False


@dataclass
class FigureFolder:
    """Draws figures into a folder; a name that another figure has, or that no file can have, is changed."""

    folder: Path
    names: list[str] = field(default_factory=list)

    def draw(self, drawing: Drawing) -> str:
        """Writes a figure's files, and returns its SVG element."""
        name = re.sub(r"[^\w.-]", "_", drawing.name)[:LONGEST_NAME]
        self.names.append(name)
        if (again := self.names.count(name)) > 1:
            name = f"{name}-{again}"
        self.folder.mkdir(parents=True, exist_ok=True)
        return save_figure(drawing.make, self.folder / name)


def write_page(folder: Path, **contents: Any) -> Path:
    """Writes the page with this title, leads, next command, cards, subtitle, notes, facts, commands, configuration and
    sections, of which the `first` ones stand before what was run, and its figures; returns its path."""
    templates = FileSystemLoader(Path(__file__).parent)
    page = Environment(loader=templates, autoescape=True, finalize=_printable).get_template("page.html")
    write_text(folder / PAGE, page.render(draw=FigureFolder(folder / "figures").draw, **contents))
    return folder / PAGE


def _printable(value: Any) -> Any:
    """A text of the page without control characters, before it is escaped; an SVG element as it is."""
    return visible(value, layout=True) if isinstance(value, str) and not isinstance(value, Markup) else value
