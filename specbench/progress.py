"""A progress bar for the terminal while a run decodes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@contextmanager
def decoding_progress(place: str = "") -> Iterator[Callable[[int, int, str], None]]:
    """Yields a function progress(done, total, what), which counts prompts; `place` says of which job. It is shown in a
    terminal alone."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("prompts"),
               TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())  # fmt: skip
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"{place}loading", total=None)
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=f"{place}{what}")
