"""A progress bar for the terminal or the notebook while a run decodes."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

ProgressFn = Callable[[int, int, str], None]  # progress(done, total, what)
WHAT = "requests"  # are counted


@contextmanager
def decoding_progress(place: str = "") -> Iterator[ProgressFn]:
    """Yields a function progress(done, total, what), which counts requests; `place` says of which job. It is shown in a
    terminal or a notebook alone."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(WHAT),
               TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())  # fmt: skip
    console = Console(stderr=True)
    if console.is_jupyter:  # where Rich needs widgets
        with _in_notebook(place) as show:
            yield show
        return
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"{place}loading", total=None)
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=f"{place}{what}")


@contextmanager
def _in_notebook(place: str) -> Iterator[ProgressFn]:
    """A line of text below the cell, which goes when all is over."""
    from IPython.display import display  # type: ignore[import-not-found]  # there, since this is a notebook

    begun = time.monotonic()

    def line(text: str) -> dict[str, str]:
        return {"text/plain": text}

    shown: Any = display(line(f"{place}loading"), raw=True, display_id=True)

    def progress(done: int, total: int, what: str) -> None:
        seconds = time.monotonic() - begun
        left = f", about {seconds * (total - done) / done:.0f} s left" if done else ""
        shown.update(line(f"{place}{what}: {done} of {total} {WHAT}, {seconds:.0f} s{left}"), raw=True)

    try:
        yield progress
    finally:
        shown.update(line(""), raw=True)
