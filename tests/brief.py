"""What a run decodes besides its prompts is most of a small run: here as little as shows what depends on it.

`install` changes the process.
"""

from specbench.config import components
from specbench.executors import autotune
from specbench.run import interleave, machine_watch, warm_up


def install() -> None:
    components.WARM_UP_TOKENS, warm_up.WIDTHS, warm_up.PROBE_TOKENS, warm_up.ROOM = 1, 0, 4, 2
    interleave.PROBES = 2
    machine_watch.CPU_BYTES, machine_watch.SIZE = 2**20, 32  # nothing depends on how much the machine's probes read,
    autotune.SECONDS, autotune.CACHE_BYTES = 0.02, 1e6  # or on which of the exact products is the fastest
