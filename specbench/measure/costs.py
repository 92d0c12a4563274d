"""Measured time of a round by the number of tokens that it drafts, for gamma policies and for replay."""

from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from specbench.decoded import Round
from specbench.decoding.clock import Lap
from specbench.results import RoundCost

Floats = npt.NDArray[np.float64]


class CostTable:
    """Seconds of rounds by gamma, which policies may read while the run goes on.

    Single rounds are noisy and their mean follows every interruption by other processes, so gammas are compared by
    medians. `summary` scales all medians by one factor so that they sum to the measured total.
    """

    def __init__(self) -> None:
        self.laps: dict[int, array[float]] = defaultdict(lambda: array("d"))  # five numbers a round
        self.acceptance: tuple[float, int] = (0.0, 0)  # sum of betas, tested positions

    def add(self, rounds: Iterable[Round]) -> None:
        """Adds rounds. A call that served several rows comes once for each of them."""
        for r in rounds:
            draft, verify = r.seconds.get(Lap.DRAFT, 0.0), r.seconds[Lap.VERIFY]
            other = r.seconds[Lap.ACCEPT] + r.seconds[Lap.HOST]
            self.laps[r.steps].extend((draft, verify, other, (draft + verify + other) / r.rows, r.rows))
            self.acceptance = self.acceptance[0] + sum(r.beta), self.acceptance[1] + r.tested

    @property
    def alpha(self) -> float:
        """Mean beta of all rounds so far; 1/2 before there is one."""
        total, tested = self.acceptance
        return (total + 0.5) / (tested + 1)

    def seconds(self, largest: int) -> Floats:
        """Seconds of a call with 0 .. largest drafter steps, [largest + 1]; on straight lines between and beyond the
        measured ones. They are of calls that served the most rows: at the end of a group they serve fewer."""
        known = sorted(self.laps)
        return extend(known, [self._full_call(self._table(g)) for g in known], largest)

    @staticmethod
    def _full_call(table: Floats) -> float:
        """The median seconds of the calls in a table [rounds, 5] that served the most rows."""
        served = table[:, 4]
        return float(np.median(table[served == served.max(), :3].sum(1)))

    def _table(self, gamma: int) -> Floats:
        """[rounds, 5]: seconds of draft, verify, other, a row's share of all three, and the rows of the call."""
        return np.reshape(self.laps[gamma], (-1, 5))

    def summary(self) -> list[RoundCost]:
        """Seconds of a round by the number of tokens that it drafts."""
        tables = {g: self._table(g) for g in sorted(self.laps)}
        medians = {g: np.median(laps, axis=0) for g, laps in tables.items()}
        total = sum(laps[:, 3].sum() for laps in tables.values())
        hiccups = total / sum(medians[g][3] * len(laps) for g, laps in tables.items())
        found = []
        for g, m in medians.items():
            draft, verify, other, share = map(float, m[:4] * hiccups)
            found.append(RoundCost(g, draft, verify, other, share, rounds=len(tables[g])))
        return found


def extend(gammas: Sequence[int], values: Sequence[float], largest: int) -> Floats:
    """Values at 0 .. largest, [largest + 1], from values at some gammas: straight lines between and beyond them."""
    wanted = np.arange(largest + 1)
    found = np.interp(wanted, gammas, values)
    if len(gammas) > 1:
        for beyond, (a, b) in ((wanted < gammas[0], (0, 1)), (wanted > gammas[-1], (-2, -1))):
            slope = (values[b] - values[a]) / (gammas[b] - gammas[a])
            anchor = a if a == 0 else b
            found = np.where(beyond, values[anchor] + slope * (wanted - gammas[anchor]), found)
    return found
