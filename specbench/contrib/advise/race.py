"""Which way of decoding is the fastest: ways are compared on units of work, and leave when they cannot win.

A unit is a request, or several that are decoded together. A way's seconds per token are the sum of its seconds over
that of its tokens. At each of a few looks, each way is tested against every other one by Student's t of the logarithm
of the ratio of their seconds per token, linearised and paired by unit. The fastest way is tested against `ways - 1`
others at each look, so with a level of LEVEL / looks / (ways - 1) for each test it leaves with probability LEVEL at
most, if times vary like a normal distribution. Those of single requests do not (a lookup may be fast on a few of them
alone), so their first look is after more of them.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from specbench.stats.bootstrap import interval_around, student, units_needed
from specbench.stats.estimates import Floats, Interval

LEVEL, RACES = 0.05, 3  # probability that the fastest way leaves, in pilot, variants and measurement together
ERROR = (
    f"The fastest way is dropped with a probability of {100 * LEVEL:g} % at most, if times vary like a normal "
    f"distribution: {100 * LEVEL / RACES:.1f} % in each of the pilot, the race of variants and the measurement. A race "
    "that begins anew, without a way whose text is wrong (as pilot-2), may err by its share again."
)
WORTH = 0.02  # ways that differ by less are equally good
FIRST, GROWTH = 5, 1.4  # units at the first look, and from one look to the next
FIRST_LOOK = 17, FIRST  # units at the first look, if a unit is one request, and if it is several
PLAIN = "plain decoding"
Unit = Mapping[str, Sequence[float]]  # by way: seconds and tokens


def looks(most: int, first: int = FIRST) -> list[int]:
    """The numbers of units at which ways may leave, from `first` up to `most`; none is reached if `most` is smaller."""
    found = [first]
    while found[-1] < most:
        found.append(min(most, int(found[-1] * GROWTH) + 1))
    return found


class Race:
    """Ways of decoding, PLAIN among them, on at most `most` units; on all of them if the gain of the fastest is wanted,
    and not only which one it is."""

    def __init__(
        self, ways: Iterable[str], most: int, level: float = LEVEL, first: int = FIRST, gain_wanted: bool = False
    ):
        self.ways, self.most, self.looks = [*ways], most, looks(most, first)
        self.gain_wanted = gain_wanted or len(self.ways) < 3
        self.level = level / len(self.looks) / max(1, len(self.ways) - 1)  # of each test
        self.left = {*self.ways}
        self.units: list[Unit] = []
        self.reasons: dict[str, str] = {}  # of those that have left
        self._decided = False

    @property
    def drafting(self) -> list[str]:
        """The ways that are left, without plain decoding, fastest first."""
        left = [way for way in self.ways if way in self.left and way != PLAIN]
        return sorted(left, key=lambda way: -self.gain(way)[0]) if self.units else left

    @property
    def over(self) -> bool:
        """Whether no further unit is needed."""
        drafting = len(self.left - {PLAIN})
        found = not self.gain_wanted and (drafting < 2 or self._decided)
        return not drafting or found or len(self.units) >= self.most

    def leave(self, way: str, reason: str) -> None:
        """A way that cannot be decoded leaves."""
        self.left.discard(way)
        self.reasons[way] = reason

    def add(self, unit: Unit) -> None:
        """Takes the times of a unit, of all ways that are left."""
        self.units.append(unit)
        for way in self.left - unit.keys():
            self.leave(way, "failed")
        if len(self.units) in self.looks and len(self.units) > 1:
            self._look()

    def _look(self) -> None:
        names = [way for way in self.ways if way in self.left]
        rates, influence = rates_of([[unit[way] for unit in self.units] for way in names])
        count = len(self.units)
        spread = (influence[:, None] - influence[None]).std(-1, ddof=1) / np.sqrt(count)  # [ways, ways]
        slower = np.log(rates[:, None] / rates[None])  # of the first than the second
        bound = student(count - 1, 2 * self.level) * spread
        for slow, fast in np.argwhere((slower > bound) & (spread > 0)):
            self.reasons.setdefault(names[slow], f"slower than {names[fast]} after {count} units")
            self.left.discard(names[slow])
        kept = [place for place, name in enumerate(names) if name in self.left and name != PLAIN]
        if len(kept) > 1:  # a single way is measured against plain decoding, to the last unit
            best = min(kept, key=lambda place: rates[place])
            self._decided = all(slower[best, place] + bound[best, place] < WORTH for place in kept if place != best)

    def gain(self, way: str, outside: float = LEVEL) -> tuple[float, Interval]:
        """Seconds per token of plain decoding over those of the way, on the units that it has, with an interval that
        misses it with the probability `outside`."""
        units = self.units_of(way)
        rates, influence = rates_of([[unit[name] for unit in units] for name in (PLAIN, way)])
        gain, count = float(rates[0] / rates[1]), len(units)
        if count < FIRST:
            return gain, None
        error = float((influence[0] - influence[1]).std(ddof=1) / np.sqrt(count))
        return gain, interval_around(gain, student(count - 1, outside) * error, True)

    def needed(self, way: str, half: float, outside: float = LEVEL) -> int | None:
        """The units that an interval of +- `half` needs, if they vary as those that are there."""
        found = self.gain(way, outside)[1]
        return units_needed(found, len(self.units_of(way)), half, outside=outside)

    def units_of(self, way: str) -> list[Unit]:
        """Those that the way has been decoded in."""
        return [unit for unit in self.units if way in unit and PLAIN in unit]


def rates_of(table: Sequence[Sequence[Sequence[float]]]) -> tuple[Floats, Floats]:
    """Seconds per token of each way [ways], and what each unit adds to its logarithm [ways, units], from seconds and
    tokens [ways, units, 2]."""
    of_units = np.array(table, float)
    shares = of_units / of_units.mean(1, keepdims=True)
    sums = of_units.sum(1)
    return sums[:, 0] / sums[:, 1], shares[..., 0] - shares[..., 1]
