"""The table of replayed policies, and what must be known to read it."""

from collections.abc import Iterator, Mapping, Sequence

from specbench.results.table import Table
from specbench.results.wording import interval
from specbench.stats.replay import Replayed, Trace

BEST = "best gamma"  # chosen on one half of the prompts and judged on the other
UNKNOWN = "unknown"


def replay_table(trace: Trace, found: Mapping[str, Replayed]) -> Table:
    """A table of predicted speedups, and each policy's share of the gain that the oracle has over the best constant
    gamma (section 3.5)."""
    best = found[BEST].speedup
    oracle = found["oracle"].speedup - best if "oracle" in found else None
    told = "each half of the prompts by the other's costs" if trace.halves else "in-sample: too few prompts for halves"
    title = f"measured on this trace: {trace.speedup:.2f}x; replayed {told}"
    headings = ("policy", "speedup", "95 %", "block efficiency", "drafted a round", "of the oracle's extra gain")
    rows = []
    for name, r in found.items():
        share = "-" if not oracle or name.startswith("gamma ") or name == BEST else f"{(r.speedup - best) / oracle:.0%}"
        ci95 = UNKNOWN if r.ci95 is None and trace.halves else interval(r.ci95)
        per_round = f"{r.drafted / r.rounds:.2f}"
        cells = (name, f"{r.speedup:.3f}x", ci95, f"{r.block_efficiency:.2f}", per_round, share)
        rows.append(dict(zip(headings, cells, strict=True)))
    return Table.of(rows, title, ["policy"])


def replay_notes(trace: Trace, found: Mapping[str, Replayed], picked: Sequence[int]) -> Iterator[str]:
    """How `best gamma` was chosen, so that it and the row of a constant gamma may differ; and why an interval is
    unknown."""
    chosen = " and ".join(f"gamma {gamma}" for gamma in dict.fromkeys(picked))
    if not trace.halves:
        yield f"{BEST}: {chosen}, chosen on the prompts it is judged on, so it looks better than it is."
    elif len({*picked}) > 1:
        yield (
            f"{BEST}: the first half of the prompts chose gamma {picked[0]} for the second, and the second gamma "
            f"{picked[1]} for the first. A row gamma N is that gamma on all prompts: the best of these rows was chosen "
            "on the prompts it is judged on, and looks better than it is."
        )
    else:
        yield f"{BEST}: each half of the prompts chose {chosen} for the other."
    yield "It is what a run's own table calls gamma, best by replay."
    if trace.halves and any(r.ci95 is None for r in found.values()):
        yield (
            f"{UNKNOWN}: the times of rounds with so many guesses differ so much from prompt to prompt that their mean "
            "is not known to be above 0. More prompts, or a machine with nothing else to do, would tell."
        )
