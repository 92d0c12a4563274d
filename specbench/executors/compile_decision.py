"""Whether compiling pays within a run: what programs would save of its decoding, beside what making them takes."""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from specbench.config.paths import cache_dir
from specbench.decoding.executor import Work

SAVED = 0.6  # of decoding beyond the reading of weights that programs save: an assumption
SECONDS = 0.9  # to make a program, for each of its weights, until this machine has made some: of two AMD cores


@dataclass(frozen=True)
class Decision:
    """Whether to compile, and why."""

    compile: bool
    sentence: str


def decide(work: Work, seconds_per_weight: float) -> Decision:
    """Compiles if that takes less time than it saves of the run's decoding."""
    saved = SAVED * max(0.0, work.seconds - work.least)
    taken = work.weights * seconds_per_weight
    if saved > taken:
        return Decision(True, f"compiles for about {taken:.0f} s: it saves about {saved:.0f} s of {work.seconds:.0f}")
    told = f"compiling would take about {taken:.0f} s and save {saved:.0f} s of {work.seconds:.0f}"
    return Decision(False, told)


class CompileTimes:
    """Seconds that programs took to make on this machine, in a file of the user's cache unless `path` is None."""

    def __init__(self, path: Path | None):
        self.path = path

    @classmethod
    def of(cls, machine: str) -> "CompileTimes":
        """Those of the machine of this description."""
        return cls(cache_dir() / f"compiling-{hashlib.sha256(machine.encode()).hexdigest()[:12]}.json")

    @property
    def seconds_per_weight(self) -> float:
        """Seconds of all programs over the number of their weights."""
        seconds, weights = self._read()
        return seconds / weights if weights else SECONDS

    def add(self, seconds: float, weights: int) -> None:
        """Adds a program that was just made, with so many weights."""
        if self.path is None:
            return
        before = self._read()
        temporary = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps({"seconds": before[0] + seconds, "weights": before[1] + weights}))
            os.replace(temporary, self.path)
        except OSError:  # a cache that cannot be written: the next run has the default
            self.path = None

    def _read(self) -> tuple[float, int]:
        """Seconds and weights; zeros if there is no such file."""
        try:
            found = json.loads((self.path or Path()).read_text())
            return float(found["seconds"]), int(found["weights"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0.0, 0
