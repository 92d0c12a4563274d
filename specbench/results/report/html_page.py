"""A report being written: its sections, and the folder of its figures."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from matplotlib.figure import Figure

from specbench.results.reader import StoredRun
from specbench.results.report.style import save_figure
from specbench.results.table import Table

LONGEST_NAME = 60  # characters of a figure's file name
PAGE = "report.html"


class Report:
    """The sections of a page, and the folder of its figures."""

    def __init__(self, folder: Path, runs: Sequence[StoredRun]):
        self.folder, self.runs = folder, runs
        self.sections: list[dict[str, Any]] = []
        self.names: list[str] = []  # of figures
        (folder / "figures").mkdir(parents=True, exist_ok=True)

    def figure(self, name: str, caption: str, make: Callable[[], Figure]) -> dict[str, str]:
        """Draws a figure into figures/; a name that another figure has, or that no file can have, is changed."""
        name = re.sub(r"[^\w.-]", "_", name)[:LONGEST_NAME]
        self.names.append(name)
        if (again := self.names.count(name)) > 1:
            name = f"{name}-{again}"
        return {"svg": save_figure(make, self.folder / "figures" / name), "caption": caption}

    def section(
        self,
        title: str,
        *,
        texts: Sequence[str] = (),
        figures: Sequence[Mapping[str, str]] = (),
        tables: Sequence[Table] = (),
        samples: Sequence[dict[str, Any]] = (),
        grid: bool = False,
    ) -> None:
        """Adds a section, without tables that have no rows and columns that have no values; `grid`: its figures stand
        side by side."""
        kept = [table.to_read() for table in tables if table.rows]
        self.sections.append({"title": title, "texts": texts, "figures": figures, "tables": kept, "samples": samples,
                              "grid": grid})  # fmt: skip

    def link(self, run: StoredRun) -> str:
        """The address of a run's own page from this one; "" where there is none."""
        page = run.folder / PAGE
        return quote(os.path.relpath(page, self.folder).replace(os.sep, "/")) if page.is_file() else ""


def cut(run: StoredRun) -> str:
    """How many rounds were read, where it is not all of them."""
    rounds, whole = len(run.rounds), run.counts["rounds"]
    if rounds == whole:
        return ""
    return f"Times of rounds and the coloured text are of the first {rounds:,} of {whole:,} rounds; numbers are of all."
