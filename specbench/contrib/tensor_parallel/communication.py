"""What ranks that share a target spend in collectives."""

from collections.abc import Sequence

from specbench.decoding.timer import COLLECTIVE, Lap, Laps, decoding_seconds
from specbench.stats.estimates import Communication


def communication(
    processes: int,
    backend: str,
    plain: Sequence[Laps],
    ours: Sequence[Laps],
    step: float,
    calls: int,
    drafter_steps: int,
) -> Communication:
    """What these ranks spent in collectives, from the laps of both decoders: `step` is the seconds of a single-token
    step, `calls` and `drafter_steps` are those of speculative decoding."""
    plain_calls_seconds = sum(laps[Lap.VERIFY] for laps in plain)
    draft, verify, other = (sum(laps[lap] for laps in ours) for lap in COLLECTIVE)
    in_all = [sum(laps[lap] for laps in decoder for lap in COLLECTIVE) for decoder in (ours, plain)]
    seconds = [sum(decoding_seconds(laps) for laps in decoder) for decoder in (ours, plain)]
    return Communication(
        processes=processes,
        backend=backend,
        share=in_all[0] / seconds[0],
        plain_share=in_all[1] / seconds[1],
        step=sum(laps[Lap.VERIFY_COLLECTIVES] for laps in plain) / plain_calls_seconds,
        c=draft / drafter_steps / step if drafter_steps else None,
        v=verify / calls / step,
        o=other / calls / step,
    )
