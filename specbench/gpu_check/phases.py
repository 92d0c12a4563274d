"""The twelve checks, most informative first."""

from specbench.gpu_check.attention import Attention
from specbench.gpu_check.check import Phase
from specbench.gpu_check.graphs import Captures, Clobber, Equality
from specbench.gpu_check.leaves import Launches, Leaves
from specbench.gpu_check.rounds import Clocks, Synchronisations
from specbench.gpu_check.steps import Fused, Step, Widths
from specbench.gpu_check.whole import Whole

PHASES: dict[int, type[Phase]] = {
    phase.number: phase
    for phase in (Clobber, Attention, Step, Fused, Synchronisations, Clocks, Leaves, Widths, Equality, Captures,
                  Launches, Whole)
}  # fmt: skip
