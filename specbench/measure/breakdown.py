"""The numbers of a run by category of prompts and by place in the draft."""

from typing import Any

import pandas as pd

from specbench.measure import formulas
from specbench.measure.intervals import Estimate, Sums
from specbench.measure.rounds import ACCEPTED_OF, BETA_AT, TESTED_AT, Sample


def by_category(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The numbers of each category of a `prompts_frame`, in order of names; empty if the data name none."""
    if not frame["category"].astype(bool).any():
        return []
    return [{"category": name} | _numbers(Sample(own)) for name, own in frame.groupby("category", sort=True)]


def _numbers(sample: Sample) -> dict[str, Any]:
    """The numbers of some requests."""
    total, speedup = sample.total, sample.of_times(formulas.speedups)["measured"]
    efficiency = sample.of_tokens(formulas.block_efficiency)["block_efficiency"]
    rates = formulas.tokens_per_second(total)
    return {
        "prompts": len(sample.frame),
        "tokens": round(total["tokens"]),
        "alpha": mean_of(sample.of_tokens(formulas.acceptance)["alpha"], total["tested"]),
        "block_efficiency": {"mean": efficiency.value, "stderr": efficiency.stderr},
        "speedup": {"measured": speedup.value, "ci95": speedup.ci95},
        **{name: float(rates[name]) for name in ("speculative_tokens_per_second", "baseline_tokens_per_second")},
    }


def mean_of(estimate: Estimate, n: float) -> dict[str, Any]:
    """An estimate over n positions, guesses or rounds, as results.json has it."""
    return {"mean": estimate.value, "stderr": estimate.stderr, "n": round(n)}


def acceptance(sample: Sample) -> dict[str, Any]:
    """`lengths`: how many rounds accepted 0, 1, .. guesses. `by_place`: the mean of beta at each place of the draft,
    over the rounds that tested it."""
    total = sample.total
    lengths, places = (numbers_behind(total, prefix) for prefix in (ACCEPTED_OF, TESTED_AT))
    means = sample.of_tokens(
        lambda s: {str(place): s[f"{BETA_AT}{place}"] / s[f"{TESTED_AT}{place}"] for place in places}
    )
    return {
        "lengths": [round(total.get(f"{ACCEPTED_OF}{n}", 0)) for n in range(max(lengths, default=-1) + 1)],
        "by_place": [
            {"place": place} | mean_of(means[str(place)], total[f"{TESTED_AT}{place}"])
            for place in places
            if means[str(place)].value is not None
        ],
    }


def numbers_behind(columns: Sums, prefix: str) -> list[int]:
    """The numbers behind a prefix in the names of columns, in order."""
    return sorted(int(name.removeprefix(prefix)) for name in columns if name.startswith(prefix))


def drift(sample: Sample) -> dict[str, Any] | None:
    """What lossy decoding costs: the means over tested positions of total variation and KL between its output
    distribution and the target's, and the largest bound of A.5; None of runs in which nothing drifts."""
    if "drift positions" not in sample.columns:
        return None
    means = sample.of_tokens(formulas.drifts)
    found: dict[str, Any] = {name: {"mean": each.value, "ci95": each.ci95} for name, each in means.items()}
    return found | {"bound": float(sample.columns["drift bound"].max())}
