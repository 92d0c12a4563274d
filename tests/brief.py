"""What a run decodes besides its prompts is most of a small run: here as little as shows what depends on it.

`install` changes the process. A warm-up has the largest gamma, and no other, unless the executor keeps a program or a
graph for each.
"""

from types import SimpleNamespace

from specbench.config import components
from specbench.executors import autotune
from specbench.run import interleave, machine_watch, warm_up

whole_warm_up = warm_up.warm_up


class OneGamma:
    """The parts of a run, of whose gammas the largest is left."""

    def __init__(self, parts):
        self._parts, self.gammas = parts, [parts.policy.largest]

    def __getattr__(self, name):
        return getattr(self._parts, name)


def brief_warm_up(session, wanted) -> None:
    executor = session.parts.target.executor
    if not executor.fixed_shapes and not getattr(getattr(executor, "layers", None), "running", False):
        session = SimpleNamespace(
            parts=OneGamma(session.parts), rows=session.rows, decode=session.decode, to_read=session.to_read
        )
    whole_warm_up(session, wanted)


def install() -> None:
    components.WARM_UP_TOKENS, warm_up.PROBE_TOKENS, warm_up.ROOM = 1, 4, 2
    interleave.warm_up = brief_warm_up
    machine_watch.CPU_BYTES, machine_watch.SIZE = 2**20, 32  # nothing depends on how much the machine's probes read,
    autotune.SECONDS, autotune.CACHE_BYTES = 0.02, 1e6  # or on which of the exact products is the fastest
