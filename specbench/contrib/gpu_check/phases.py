"""The twelve checks, most informative first."""

from specbench.contrib.gpu_check.attention import Attention
from specbench.contrib.gpu_check.check import Phase
from specbench.contrib.gpu_check.end_to_end import Whole
from specbench.contrib.gpu_check.graphs import Captures, Clobber, Equality
from specbench.contrib.gpu_check.leaves import Launches, Leaves
from specbench.contrib.gpu_check.rounds import Clocks, Synchronisations
from specbench.contrib.gpu_check.steps import Fused, Step, Widths

PHASES: dict[int, type[Phase]] = {
    phase.number: phase
    for phase in (Clobber, Attention, Step, Fused, Synchronisations, Clocks, Leaves, Widths, Equality, Captures,
                  Launches, Whole)
}  # fmt: skip
