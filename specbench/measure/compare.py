"""Compares methods on the prompts that all of them decoded: paired ratios with intervals, Holm's tests, a ranking."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

import pandas as pd

from specbench.measure import formulas
from specbench.measure.intervals import FEWEST, Estimate, Floats, Sums, estimates, student_tail
from specbench.measure.record import Record
from specbench.measure.rounds import clusters_of_prompts, clusters_of_times, columns_of, prompts_frame

LEVEL = 0.05  # of all tests of one comparison together
RANKED_BY: dict[str, Callable[[Sums], Any]] = {
    "tokens_per_second": lambda s: formulas.tokens_per_second(s)["speculative_tokens_per_second"],
    "speedup": lambda s: formulas.speedups(s)["measured"],
}


def compare(runs: Mapping[str, Sequence[Record]], by: str = "tokens_per_second") -> list[dict[str, Any]]:
    """One row a run, the fastest first, over the requests that all runs finished. `by` is `tokens_per_second` of runs
    that were decoded in turn, `speedup` of others, between which the machine may have changed. `ratio` and `p_value`
    (by Holm's method, for all pairs together) are against the first row; `rank` is 1 + the number of runs that are
    significantly faster. Raises ValueError if the runs share no request."""
    frames = shared(runs)
    clusters = min((clusters_of_times(frame) for frame in frames.values()), key=lambda names: len({*names}))
    sums = {label: columns_of(frame) for label, frame in frames.items()}
    speed = {label: float(RANKED_BY[by](_total(columns))) for label, columns in sums.items()}
    order = sorted(speed, key=lambda label: -speed[label])
    pairs = {(a, b): _ratio(sums[a], sums[b], clusters, by) for a, b in combinations(order, 2)}
    corrected = holm({pair: p for pair, (_, p) in pairs.items() if p is not None})
    rows = []
    for label in order:
        faster = [pair for pair, p in corrected.items() if pair[1] == label and p < LEVEL]
        row = {"method": label, "rank": 1 + len(faster), "requests": len(clusters)}
        row |= {"ratio": 1.0, "ratio_ci95": None, "p_value": None}
        if label != order[0]:
            ratio = pairs[order[0], label][0]
            inverse = None if ratio.ci95 is None else (1 / ratio.ci95[1], 1 / ratio.ci95[0])
            row |= {"ratio": 1 / ratio.value if ratio.value else None, "ratio_ci95": inverse}
            row["p_value"] = corrected.get((order[0], label))
        rows.append(row | _numbers(sums[label], clusters_of_prompts(frames[label]), clusters))
    return rows


def shared(runs: Mapping[str, Sequence[Record]]) -> dict[str, pd.DataFrame]:
    """The sums of the requests that all runs finished, by processes of the same number, in one order. Raises
    ValueError if there are none."""
    frames = {label: prompts_frame(records) for label, records in runs.items()}
    keys = {
        label: [*zip(frame.get("process", ()), frame.get("id", ()), strict=True)] for label, frame in frames.items()
    }
    known = set.intersection(*({*own} for own in keys.values()))
    if not known:
        raise ValueError(f"{' and '.join(runs)} share no request: runs are compared on the same prompts")
    return {
        label: frame[[key in known for key in keys[label]]].sort_values(["process", "id"], ignore_index=True)
        for label, frame in frames.items()
    }


def holm(p_values: Mapping[Any, float]) -> dict[Any, float]:
    """Holm's method: the k-th smallest of m p-values is multiplied by m - k + 1, and none is below one before it."""
    found: dict[Any, float] = {}
    lowest = 0.0
    for number, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        lowest = max(lowest, min(1.0, p * (len(p_values) - number)))
        found[name] = lowest
    return found


def _total(columns: Mapping[str, Floats]) -> dict[str, float]:
    return {name: float(column.sum()) for name, column in columns.items()}


def _ratio(
    first: Mapping[str, Floats], second: Mapping[str, Floats], clusters: Sequence[str], by: str
) -> tuple[Estimate, float | None]:
    """What the first run is ranked by over that of the second, from columns [requests] in one order, and the
    probability of a ratio so far from 1 if they did not differ; None with too few clusters."""
    both = {f"{place}{name}": own for place, run in enumerate((first, second)) for name, own in run.items()}

    def ratio(s: Sums) -> dict[str, Any]:
        one, other = ({name[1:]: value for name, value in s.items() if name[0] == place} for place in "01")
        return {"ratio": RANKED_BY[by](one) / RANKED_BY[by](other)}

    found, count = estimates(both, clusters, ratio)["ratio"], len({*clusters})
    if found.value is None or found.stderr is None or count < FEWEST:
        return found, None
    if found.stderr == 0:
        return found, float(found.value == 1)
    return found, student_tail(math.log(found.value) * found.value / found.stderr, count - 1)


def _numbers(columns: Mapping[str, Floats], prompts: Sequence[str], times: Sequence[str]) -> dict[str, Any]:
    """The numbers of one run over the shared requests."""
    speedup = estimates(columns, times, formulas.speedups)["measured"]
    rate = estimates(columns, times, formulas.tokens_per_second)["speculative_tokens_per_second"]
    accepted = estimates(columns, prompts, formulas.acceptance, log=False)
    cost, tokens = formulas.costs(_total(columns)), formulas.block_efficiency(_total(columns))
    numbers = {name: float(cost[name]) for name in ("c", "v", "o")} | tokens
    return {
        "tokens_per_second": rate.value,
        "tokens_per_second_ci95": rate.ci95,
        "speedup": speedup.value,
        "speedup_ci95": speedup.ci95,
        **{name: accepted[name].value for name in ("alpha", "alpha_on_target_text")},
        **{name: value if math.isfinite(value) else None for name, value in numbers.items()},
    }
