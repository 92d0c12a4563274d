"""What a command prints of its runs: progress, then everything of a single one, and one line of each in a sweep."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from specbench.results.recommendation import details, verdict_sentence
from specbench.results.terminal import show
from specbench.results.wording import duration, steady, verdict_text, within, word

log = logging.getLogger(__name__)
ProgressFn = Callable[[int, int, str], None]  # progress(done, total, what)
WHAT = "requests"  # are counted


def in_sweep() -> bool:
    """Whether this is a job of a multirun."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def in_parallel() -> bool:
    """Whether this is a job of a multirun whose launcher may run several at a time, in processes of their own."""
    return in_sweep() and HydraConfig.get().runtime.choices.get("hydra/launcher", "basic") != "basic"


def place_of_job() -> str:
    """Which job of a multirun this is, before what it does."""
    return f"job {HydraConfig.get().job.num + 1}: " if in_sweep() else ""


def info(text: str) -> None:
    """A remark on a run."""
    log.info("%s", text)
    if not in_sweep():
        show(Text(text, style="dim"))


def log_result(result: dict[str, Any], kept: Path | None, folder: Path) -> None:
    """What run.log says at the end of a run."""
    log.info("%s", verdict_sentence(result))
    if told := details(result):
        log.info("%s", told)
    log.info("lossless: %s", verdict_text(result["lossless"])[0])
    for note in result["notes"]:
        log.info("note: %s", note)
    log.info("written to %s", folder)
    if kept is not None:
        log.info("the run that was there before is in its folder %s", kept.name)


def print_result(result: dict[str, Any], kept: Path | None, folder: Path) -> None:
    """The results of a run, and where those are that stood in its folder before."""
    log_result(result, kept, folder)
    if not in_sweep():
        from specbench.results.run_table import run_table

        if kept is not None:
            show(Text(f"the run that was there before is in its folder {kept.name}", style="dim"))
        show(run_table(result, folder))


def one_line(result: dict[str, Any]) -> str:
    """The results of a run in a few words."""
    speedup, alpha, label = result["speedup"], result["alpha"]["mean"], word(result["lossless"])
    told = [f"{speedup['measured']:.2f}x{within(speedup['ci95'])}"]
    told += [] if alpha is None else [f"alpha {alpha:.2f}"]
    told += [] if label == "passed" else [label]
    return ", ".join([*told, *["not steady"] * (not steady(result))])


@dataclass
class Pace:
    """How many of the jobs of a command are over, and how long those that ran have taken."""

    jobs: int
    kind: str = ""  # what they are called, if not jobs
    silent: bool = False
    alone: bool = True  # one job at a time, in this process
    over: int = 0
    seconds: list[float] = field(default_factory=list)
    _begun: float = field(default_factory=lambda: time.monotonic())

    def end(self, text: str, ran: bool = True) -> None:
        """Prints the line of a job that is over; `ran` is False if it was finished before."""
        now = time.monotonic()
        self.over += 1
        if ran:
            self.seconds.append(now - self._begun)
            text += f"; {duration(self.seconds[-1])}"
        self._begun = now
        if left := self.left():
            text += f"; {left} left"
        if self.jobs > 1:
            place = f"{self.kind} {self.over} of {self.jobs}: " if self.kind else f"{self.over}/{self.jobs} "
            text = place + text
        if not self.silent:
            show(Text(text))

    def left(self) -> str:
        """What the other jobs will take, if they take as long as those that ran; "" if that is not known."""
        remaining = self.jobs - self.over
        known = remaining > 0 and self.seconds and self.alone
        return duration(remaining * sum(self.seconds) / len(self.seconds)) if known else ""


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
