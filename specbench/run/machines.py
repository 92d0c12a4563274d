"""The machines of several processes that decoded a run."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from specbench.run.pooled import worst_machine
from specbench.stats.estimates import Machine
from specbench.stats.machine_noise import Probes, Roofs
from specbench.stats.records import Group


class Machines:
    """Each machine is judged by the groups that its process has decoded."""

    def __init__(self, what: str, probes: Mapping[int, Probes], groups: Mapping[int, Sequence[int]]):
        """By the number of a process: what was measured, and the places of its groups among the run's, in the order in
        which it decoded them. `what` a process is called."""
        self.what, self.probes, self.groups = what, probes, groups

    @property
    def roofs(self) -> Roofs:
        """The bandwidth of all machines together: the median of their reads."""
        every = Probes()
        for one in self.probes.values():
            every.join(one)
        return every.roofs

    def judge(self, groups: Sequence[Group]) -> Machine:
        """`groups` are those of the run, in their order."""
        found = {
            f"{self.what} {number}": asdict(probes.judge([groups[place] for place in self.groups.get(number, ())]))
            for number, probes in sorted(self.probes.items())
        }
        return Machine(**worst_machine(found))
