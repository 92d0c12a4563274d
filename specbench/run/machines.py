"""The machines of several processes that decoded a run."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from specbench.run.pooled import worst_machine
from specbench.stats.estimates import Machine
from specbench.stats.machine_noise import Probes, Roofs
from specbench.stats.records import Group


@dataclass
class Machines:
    """Each machine is judged by the groups that its process has decoded."""

    what: str  # a process is called
    probes: Mapping[int, Probes]  # what was measured, by the number of a process
    groups: Mapping[int, Sequence[int]]  # the places of its groups among the run's, in the order of decoding
    reasons: Sequence[str] = ()  # why they were not one machine

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
        worst = Machine(**worst_machine(found))
        return replace(worst, steady=worst.steady and not self.reasons, reasons=[*worst.reasons, *self.reasons])
