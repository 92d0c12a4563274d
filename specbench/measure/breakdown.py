"""The numbers of a run by category of prompts and by place in the draft."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from specbench.measure import formulas
from specbench.measure.intervals import Estimate, Floats, Sums, estimates
from specbench.measure.rounds import ACCEPTED_OF, BETA_AT, TESTED_AT, clusters_of_prompts, clusters_of_times, columns_of


def by_category(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The numbers of each category of a `prompts_frame`, in order of names; empty if the data name none."""
    if not frame["category"].astype(bool).any():
        return []
    return [{"category": name} | numbers_of(own) for name, own in frame.groupby("category", sort=True)]


def numbers_of(frame: pd.DataFrame) -> dict[str, Any]:
    """The numbers of some requests."""
    columns, prompts, times = columns_of(frame), clusters_of_prompts(frame), clusters_of_times(frame)
    alpha = estimates(columns, prompts, formulas.acceptance, log=False)["alpha"]
    efficiency = estimates(columns, prompts, formulas.block_efficiency)["block_efficiency"]
    speedup = estimates(columns, times, formulas.speedups)["measured"]
    rates = formulas.tokens_per_second({name: column.sum() for name, column in columns.items()})
    return {
        "prompts": len(frame),
        "tokens": round(columns["tokens"].sum()),
        "alpha": mean_of(alpha, columns["tested"].sum()),
        "block_efficiency": {"mean": efficiency.value, "stderr": efficiency.stderr},
        "speedup": {"measured": speedup.value, "ci95": speedup.ci95},
        **{name: float(rates[name]) for name in ("speculative_tokens_per_second", "baseline_tokens_per_second")},
    }


def mean_of(estimate: Estimate, n: float) -> dict[str, Any]:
    """An estimate over n positions, guesses or rounds, as results.json has it."""
    return {"mean": estimate.value, "stderr": estimate.stderr, "n": round(n)}


def acceptance(frame: pd.DataFrame) -> dict[str, Any]:
    """`lengths`: how many rounds accepted 0, 1, .. guesses. `by_place`: the mean of beta at each place of the draft,
    over the rounds that tested it."""
    columns = columns_of(frame)
    lengths = numbers_behind(columns, ACCEPTED_OF)
    places = numbers_behind(columns, TESTED_AT)
    found = estimates(columns, clusters_of_prompts(frame), _betas(places), log=False)
    return {
        "lengths": [round(_sum(columns, f"{ACCEPTED_OF}{n}")) for n in range(max(lengths, default=-1) + 1)],
        "by_place": [
            {"place": place} | mean_of(found[str(place)], _sum(columns, f"{TESTED_AT}{place}")) for place in places
        ],
    }


def numbers_behind(columns: Sums, prefix: str) -> list[int]:
    """The numbers behind a prefix in the names of columns, in order."""
    return sorted(int(name.removeprefix(prefix)) for name in columns if name.startswith(prefix))


def _sum(columns: dict[str, Floats], name: str) -> float:
    """The sum of a column, 0 if it is not there."""
    return float(columns.get(name, np.zeros(0)).sum())


def _betas(places: list[int]) -> Callable[[Sums], dict[str, Any]]:
    """The formula of beta's mean at each place."""
    return lambda s: {str(place): s[f"{BETA_AT}{place}"] / s[f"{TESTED_AT}{place}"] for place in places}
