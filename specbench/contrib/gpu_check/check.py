"""What a check is: a phase that prepares and measures, numbers with limits, and verdicts."""

import dataclasses
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from specbench.contrib.gpu_check.fixtures import Lab
from specbench.contrib.gpu_check.timer import Timer

PASSED, FAILED, UNCLEAR, TOLD = "passed", "failed", "unclear", "told"
COMPARISONS: dict[str, Callable[[float, float], bool]] = {"<=": operator.le, ">=": operator.ge}


@dataclass(frozen=True)
class Number:
    """A measured number. `limit` is (">=", 0.85), say; a number without one is told and judged by nobody. `value` is
    None, and `remark` says why, if it could not be measured."""

    name: str
    value: float | None
    unit: str = ""
    limit: tuple[str, float] | None = None
    remark: str = ""

    @property
    def verdict(self) -> str:
        if self.limit is None:
            return TOLD
        if self.value is None:
            return UNCLEAR
        comparison, bound = self.limit
        return PASSED if COMPARISONS[comparison](self.value, bound) else FAILED

    def as_dict(self) -> dict[str, Any]:
        """One line of a phase's file, and an entry of results.json."""
        return dataclasses.asdict(self) | {"verdict": self.verdict}

    @staticmethod
    def from_dict(line: dict[str, Any]) -> "Number":
        """The inverse of `as_dict`."""
        limit = line["limit"]
        return Number(line["name"], line["value"], line["unit"], None if limit is None else (limit[0], limit[1]),
                      line["remark"])  # fmt: skip


@dataclass
class Outcome:
    """What became of a phase."""

    number: int
    title: str
    allowed_seconds: float
    seconds: float
    numbers: Sequence[Number] = field(default_factory=list)
    error: str = ""  # the end of its log, if it did not finish
    out_of_time: bool = False

    @property
    def verdict(self) -> str:
        """Failed if a number misses its limit or the phase broke off with an error; unclear if it ran out of time, or a
        number with a limit is missing."""
        found = {number.verdict for number in self.numbers}
        if FAILED in found or (self.error and not self.out_of_time):
            return FAILED
        if self.out_of_time or UNCLEAR in found or PASSED not in found:
            return UNCLEAR
        return PASSED

    def as_dict(self) -> dict[str, Any]:
        """The entry of results.json."""
        numbers = [number.as_dict() for number in self.numbers]
        for number in numbers:
            if number["value"] is not None and not math.isfinite(number["value"]):
                number["value"] = None  # not in JSON; its verdict stays
        return dataclasses.asdict(self) | {"numbers": numbers, "verdict": self.verdict}


class Phase(ABC):
    """One of the checks: `prepare` builds models and tensors, `measure` yields its numbers as they are found."""

    number: ClassVar[int]
    title: ClassVar[str]
    seconds: ClassVar[int]  # its share of ten minutes; what earlier phases leave is added
    meaning: ClassVar[str]  # what it shows, and what to do if it fails

    @abstractmethod
    def prepare(self, lab: Lab) -> Any:
        """Builds what `measure` needs."""

    @abstractmethod
    def measure(self, prepared: Any, timer: Timer) -> Iterator[Number]:
        """Measures, one number after the other."""
