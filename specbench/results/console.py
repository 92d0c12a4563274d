"""What a command prints of its runs: everything of a single one, and one line of each in a sweep. run.log has both."""

import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from rich.text import Text

from specbench.results.recommendation import verdict_sentence
from specbench.results.terminal import show
from specbench.results.wording import duration, verdict_text, word

log = logging.getLogger(__name__)


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

        show(run_table(result, folder))
        if kept is not None:
            show(Text(f"the run that was there before is in its folder {kept.name}", style="dim"))


def one_line(result: dict[str, Any]) -> str:
    """The results of a run in a few words."""
    speedup, ci95, alpha = result["speedup"]["measured"], result["speedup"]["ci95"], result["alpha"]["mean"]
    text = f"{speedup:.2f}x"
    text += "" if ci95 is None else f" ({ci95[0]:.2f} to {ci95[1]:.2f})"
    text += "" if alpha is None else f", alpha {alpha:.2f}"
    text += "" if (label := word(result["lossless"])) == "passed" else f", {label}"
    steady = not result["machine"] or result["machine"]["steady"]
    return text if steady else f"{text}, not steady"


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
        place = f"{self.kind} {self.over} of {self.jobs}: " if self.kind else f"{self.over}/{self.jobs} "
        if not self.silent:
            show(Text(f"{place if self.jobs > 1 else ''}{text}"))

    def left(self) -> str:
        """What the other jobs will take, if they take as long as those that ran; "" if that is not known."""
        remaining = self.jobs - self.over
        return (
            duration(remaining * sum(self.seconds) / len(self.seconds))
            if remaining > 0 and self.seconds and self.alone
            else ""
        )
