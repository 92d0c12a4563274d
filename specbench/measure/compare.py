"""Compares methods on the prompts that all of them decoded: paired ratios with intervals, Holm's tests, a ranking."""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import pandas as pd

from specbench.measure import formulas
from specbench.measure.record import Record
from specbench.measure.sums import FEWEST, Estimate, Sample, Sums, estimates, prompts_frame, student_tail

LEVEL = 0.05  # of all tests of one comparison together


def compare(runs: Mapping[str, Sequence[Record]]) -> list[dict[str, Any]]:
    """One row a run, that of the most tokens per second first, over the requests that all runs finished. `ratio` and
    `p_value` (by Holm's method, for all pairs together) are against the first row; `rank` is 1 + the number of runs
    that are significantly faster. Raises ValueError if the runs share no request."""
    samples = {label: Sample(frame) for label, frame in shared(runs).items()}
    clusters = min((sample.times for sample in samples.values()), key=lambda names: len({*names}))
    for sample in samples.values():
        sample.times = clusters
    speed = {label: float(_speed(sample.total)) for label, sample in samples.items()}
    order = sorted(speed, key=lambda label: -speed[label])
    pairs = {(a, b): _ratio(samples[b], samples[a]) for a, b in combinations(order, 2)}
    corrected = holm({pair: p for pair, (_, p) in pairs.items() if p is not None})
    rows = []
    for label in order:
        faster = [pair for pair, p in corrected.items() if pair[1] == label and p < LEVEL]
        row = {"method": label, "rank": 1 + len(faster), "requests": len(clusters)}
        row |= {"ratio": 1.0, "ratio_ci95": None, "p_value": None}
        if label != order[0]:
            ratio = pairs[order[0], label][0]
            p_value = corrected.get((order[0], label))
            row |= {"ratio": ratio.value, "ratio_ci95": ratio.ci95, "p_value": p_value}
        rows.append(row | _numbers(samples[label]))
    return rows


def shared(runs: Mapping[str, Sequence[Record]]) -> dict[str, pd.DataFrame]:
    """The sums of the requests that all runs finished, in one order. Raises ValueError if there are none."""
    frames = {label: prompts_frame(records) for label, records in runs.items()}
    keys = {label: [*zip(own.get("process", ()), own.get("id", ()), strict=True)] for label, own in frames.items()}
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


def _speed(sums: Sums) -> Any:
    """What runs are ranked by."""
    return formulas.tokens_per_second(sums)["speculative_tokens_per_second"]


def _ratio(first: Sample, second: Sample) -> tuple[Estimate, float | None]:
    """What the first run is ranked by over that of the second, both of the same requests in one order, and the
    probability of a ratio so far from 1 if they did not differ; None with too few clusters."""
    both = {f"{place}{name}": own for place, run in enumerate((first, second)) for name, own in run.columns.items()}

    def ratio(s: Sums) -> dict[str, Any]:
        one, other = ({name[1:]: value for name, value in s.items() if name[0] == place} for place in "01")
        return {"ratio": _speed(one) / _speed(other)}

    found, count = estimates(both, first.times, ratio)["ratio"], len({*first.times})
    if found.value is None or found.stderr is None or count < FEWEST:
        return found, None
    if found.stderr == 0:
        return found, float(found.value == 1)
    return found, student_tail(math.log(found.value) * found.value / found.stderr, count - 1)


def _numbers(run: Sample) -> dict[str, Any]:
    """The numbers of one run over the shared requests."""
    speedup = run.of_times(formulas.speedups)["measured"]
    rate = run.of_times(formulas.tokens_per_second)["speculative_tokens_per_second"]
    accepted, cost = run.of_tokens(formulas.acceptance), run.of_times(formulas.costs)
    return {
        "tokens_per_second": rate.value,
        "tokens_per_second_ci95": rate.ci95,
        "speedup": speedup.value,
        "speedup_ci95": speedup.ci95,
        **{name: accepted[name].value for name in ("alpha", "alpha_on_target_text")},
        **{name: cost[name].value for name in ("c", "v", "o")},
        "block_efficiency": run.of_tokens(formulas.block_efficiency)["block_efficiency"].value,
    }
