"""Intervals by the delete-one jackknife over clusters, with Student's t (Tukey 1958). Deterministic.

A formula is a function of sums by name, each a number or an array; it is evaluated once on all clusters together and
once on all but each one. n clusters.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Sums = Mapping[str, Any]
Formula = Callable[[Sums], Mapping[str, Any]]
Interval = tuple[float, float] | None

FEWEST = 3  # clusters: with fewer there is no interval
SAME = 1e-12  # relative change of a number below which a cluster says nothing of it


@dataclass(frozen=True)
class Estimate:
    """A number of a run; None where it has no value, or no error can be given."""

    value: float | None
    stderr: float | None = None
    ci95: Interval = None


def estimates(
    columns: Mapping[str, Floats], clusters: Sequence[Any] | npt.NDArray[Any], formula: Formula, log: bool = True
) -> dict[str, Estimate]:
    """The numbers that a formula makes of columns [requests], whose `clusters` [requests] are independent. With `log`
    the interval is that of the logarithm, as ratios need it; the standard error is always that of the number."""
    by = by_cluster(columns, clusters)
    total = {name: column.sum() for name, column in by.items()}
    with np.errstate(divide="ignore", invalid="ignore"):
        point = formula(total)
        without = formula({name: total[name] - column for name, column in by.items()})
    return {name: _estimate(point[name], without[name], log) for name in point}


def by_cluster(columns: Mapping[str, Floats], clusters: Sequence[Any] | npt.NDArray[Any]) -> dict[str, Floats]:
    """The sums of columns [requests] over each cluster: [n]."""
    names, numbers = np.unique(np.asarray(clusters), return_inverse=True)
    return {name: np.bincount(numbers, column, len(names)).astype(float) for name, column in columns.items()}


def _estimate(point: Any, without: Any, log: bool) -> Estimate:
    """From a number and the same without each cluster [n]. A cluster without which it is the same says nothing of it,
    as one in which nothing was drafted says nothing of c, and is not counted."""
    value = float(point)
    if not math.isfinite(value):
        return Estimate(None)
    without = np.broadcast_to(np.asarray(without, float), np.shape(without) or (1,))
    counted = without[~(np.abs(without - value) <= SAME * abs(value))]
    if not len(counted):
        return Estimate(value, 0.0, (value, value)) if len(without) >= FEWEST else Estimate(value)
    if len(counted) < FEWEST or not np.isfinite(counted).all():
        return Estimate(value)
    stderr = _spread(counted)
    if not log:
        half = student(len(counted) - 1) * stderr
        return Estimate(value, stderr, (value - half, value + half))
    if value <= 0 or (counted <= 0).any():
        return Estimate(value, stderr)
    half = student(len(counted) - 1) * _spread(np.log(counted))
    return Estimate(value, stderr, (value * math.exp(-half), value * math.exp(half)))


def _spread(without: Floats) -> float:
    """The jackknife's standard error, from the values without each of n clusters [n]."""
    n = len(without)
    return math.sqrt((n - 1) / n * float(((without - without.mean()) ** 2).sum()))


@cache
def student(freedom: float, outside: float = 0.05) -> float:
    """What Student's t exceeds with probability `outside`, both signs together."""
    angle, mass = _student(freedom := min(freedom, 1e5))  # beyond, the angles are too coarse
    return float(math.sqrt(freedom) * np.tan(np.interp(1 - outside, mass, angle)))


def student_tail(t: float, freedom: float) -> float:
    """The probability that Student's t is farther from 0 than t."""
    angle, mass = _student(freedom)
    return float(1 - np.interp(math.atan(abs(t) / math.sqrt(freedom)), angle, mass))


def _student(freedom: float) -> tuple[Floats, Floats]:
    """Angles in [0, pi / 2] and the probability that |t| is below sqrt(freedom) tan(angle): in this variable the
    density is cos(angle)^(freedom - 1), whose range is finite."""
    angle = np.linspace(0, np.pi / 2, 20_001)
    density = np.cos(angle).clip(min=0) ** (freedom - 1)
    mass = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return angle, mass / mass[-1]
