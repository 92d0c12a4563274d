"""Whether the machine was the same all through a run, by short probes before, between and after prompts, the time of
plain decoding's steps in their order, and what other processes took of the cores."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from specbench.decoding.timer import Lap
from specbench.stats.estimates import Floats, Machine
from specbench.stats.records import Group

DRIFT_LIMIT = 0.1  # change of the step time over the run, which must also be beyond ERRORS standard errors
ERRORS = 3.0
PROBE_LIMIT = 0.6  # (90th percentile - 10th) / median of the probes of compute, or of bandwidth
OTHERS_LIMIT = 0.1  # other processes' share of the time of the cores that this process may use
STEAL_LIMIT = 0.02  # the share that the machine's host gave to other machines
FEWEST_GROUPS = 8  # of prompts, for the drift of the step time
FEWEST_PROBES = 5


class Roofs(NamedTuple):
    """Bytes per second that the memory was measured to read and, on CUDA, to copy, where each byte counts twice."""

    read: float
    copy: float | None = None


class Use(NamedTuple):
    """Seconds since some moment, of the cores that this process may use: all, busy ones, ones that the host gave away,
    and ones that this process used and those that it started, W&B's service among them."""

    total: float
    busy: float
    steal: float
    own: float


@dataclass
class Probes:
    """What was measured of a machine, in its order."""

    reads: list[float] = field(default_factory=list)  # bytes per second
    seconds: list[float] = field(default_factory=list)  # of the compute probe
    uses: list[Use] = field(default_factory=list)
    left_out: list[tuple[Use, Use]] = field(default_factory=list)  # before and after the work of peers elsewhere
    copy: float | None = None  # bytes per second, on CUDA

    def join(self, later: "Probes") -> None:
        """Adds what was measured after these."""
        for name in ("reads", "seconds", "uses", "left_out"):
            vars(self)[name] += vars(later)[name]
        self.copy = later.copy if self.copy is None else self.copy

    @property
    def roofs(self) -> Roofs:
        """The memory's bandwidth: the median of the reads."""
        return Roofs(statistics.median(self.reads), self.copy)

    def judge(self, groups: Sequence[Group]) -> Machine:
        """What is known of the machine at the end of a run; `groups` in the order of decoding."""
        drift, error, halves = step_drift(*step_times(groups))
        others, steal = shares(self.uses, self.left_out)
        found = Machine(True, [], drift, error, halves, variation(self.seconds), variation(self.reads), others, steal,
                        len(self.reads))  # fmt: skip
        told = reasons(found)
        return replace(found, steady=not told, reasons=told)


def reasons(found: Machine) -> list[str]:
    """Why a machine was not steady, in words."""
    told = []
    drift, error = found.step_drift, found.step_drift_stderr
    if drift is not None and error is not None and abs(drift) > max(DRIFT_LIMIT, ERRORS * error):
        way = "slower" if drift > 0 else "faster"
        told.append(f"plain decoding's step became {abs(drift):.0%} {way} over the run (+- {error:.0%})")
    limits = (
        (found.compute_variation, PROBE_LIMIT, "probes of compute vary by {:.0%}"),
        (found.bandwidth_variation, PROBE_LIMIT, "probes of bandwidth vary by {:.0%}"),
        (found.others, OTHERS_LIMIT, "other processes used {:.0%} of the cores"),
        (found.steal, STEAL_LIMIT, "the host gave {:.0%} of the cores to other machines"),
    )
    return told + [sentence.format(value) for value, limit, sentence in limits if value is not None and value > limit]


def step_times(groups: Sequence[Group]) -> tuple[Floats, Floats]:
    """Seconds of a step of plain decoding in each group, and the mean columns that its rows had, [groups] each."""
    steps, columns = [], []
    for group in groups:
        if group.baseline.calls:
            steps.append(group.baseline.laps[Lap.VERIFY] / group.baseline.calls)
            lengths = [r.position + x.request.columns for x in group.results for r in x.baseline.rounds]
            columns.append(float(np.mean(lengths)))
    return np.array(steps), np.array(columns)


def step_drift(seconds: Floats, columns: Floats) -> tuple[float | None, float | None, float | None]:
    """The change of the step time from the first group to the last one, by a straight line of order and columns through
    its logarithms, its standard error, and the second half's median over the first's, - 1. None with too few groups."""
    count = len(seconds)
    if count < FEWEST_GROUPS or not (seconds > 0).all():
        return None, None, None
    terms = [np.ones(count), np.linspace(-0.5, 0.5, count)]
    if np.ptp(columns) > 0:
        terms.append((columns - columns.mean()) / np.ptp(columns))
    table, logs = np.stack(terms, 1), np.log(seconds)
    inverse = np.linalg.pinv(table.T @ table)
    fitted = inverse @ table.T @ logs
    error = np.sqrt(inverse[1, 1] * ((logs - table @ fitted) ** 2).sum() / (count - len(terms)))
    halves = np.median(seconds[count // 2 :]) / np.median(seconds[: count // 2]) - 1
    return float(np.expm1(fitted[1])), float(error), float(halves)


def variation(values: Sequence[float]) -> float | None:
    """(90th percentile - 10th) / median; None with too few probes."""
    if len(values) < FEWEST_PROBES:
        return None
    low, middle, high = np.percentile(values, [10, 50, 90])
    return float((high - low) / middle)


def shares(uses: Sequence[Use], left_out: Sequence[tuple[Use, Use]] = ()) -> tuple[float | None, float | None]:
    """What other processes had of the cores between the first and the last look, and what the host gave away; without
    what was used between the two looks of each pair that is `left_out`."""
    if len(uses) < 2:
        return None, None
    spans = np.array([(uses[0], uses[-1]), *left_out])  # [spans, 2, 4]
    grown = spans[:, 1] - spans[:, 0]
    total, busy, steal, own = map(float, grown[0] - grown[1:].sum(0))
    if total <= 0:
        return None, None
    return max(0.0, busy - own) / total, steal / total
