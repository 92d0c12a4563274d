"""The numbers of results.json that tables, pages, CSV files and loggers show: name, place, heading and form.

The fields themselves are declared, and described, in `schema.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specbench.results.schema import flatten

ResultDict = Mapping[str, Any]  # what results.json holds


@dataclass(frozen=True)
class Field:
    """A number of results.json."""

    name: str  # in CSV files
    path: str  # in results.json, as "speedup/ci95/0"
    digits: int = 3  # behind the point in tables; 0 for counts
    heading: str = ""  # in tables, if it is not the name
    about: str = ""  # one line for who reads the heading

    @property
    def head(self) -> str:
        """What stands above a column."""
        return self.heading or self.name

    def of(self, result: ResultDict) -> Any:
        """The number in a run's results, or None where there is none."""
        return at(result, self.path)


def at(tree: Any, path: str) -> Any:
    """The value at a path like "speedup/ci95/0", or None where there is none."""
    for key in path.split("/"):
        tree = tree[int(key)] if isinstance(tree, list) else tree.get(key)
        if tree is None:
            return None
    return tree


FIELDS = {field.name: field for field in (
    Field("alpha", "alpha/mean"),
    Field("stderr", "alpha/stderr"),
    Field("alpha_counted", "alpha_counted/mean", heading="alpha, accepted / tested"),
    Field("alpha_on_text", "alpha_on_target_text/mean", heading="alpha on the target's own text"),
    Field("tau", "block_efficiency/mean", heading="block efficiency", about="tokens per target call (tau, MAT)"),
    Field("tau_of_requests", "block_efficiency_of_requests/mean", heading="block efficiency, mean of requests"),
    Field("recited", "recited", about="share of new tokens that end 8 in a row which stand earlier in prompt or text"),
    Field("c", "cost/c", about="a drafter step / a target step"),
    Field("v", "cost/v", about="a target call of a round / a target step"),
    Field("o", "cost/o", about="the rest of a round / a target step"),
    Field("target step seconds", "cost/target_step_seconds", heading="target step, s"),
    Field("speedup", "speedup/measured", 2, about="decoding alone, over plain decoding of the same prompts"),
    Field("low", "speedup/ci95/0", 2),
    Field("high", "speedup/ci95/1", 2),
    Field("geometric_mean", "speedup/geometric_mean/mean", 2, "speedup, geometric mean of requests"),
    Field("processes", "repeats/processes", 0),
    Field("sd", "repeats/sd/speedup", about="of the speedup between processes, relative"),
    Field("Thm 3.8", "speedup/theorem_3_8", 2, about="from the run's own alpha, gamma and c"),
    Field("end_to_end", "speedup/end_to_end", 2, "end to end", "the speedup with prefill"),
    Field("tokens/s", "throughput/speculative_tokens_per_second", 1),
    Field("plain tokens/s", "throughput/baseline_tokens_per_second", 1),
    Field("experts", "experts/verify", 1, "experts woken in a layer by the call of a round"),
    Field("plain_experts", "experts/plain", 1, "by a plain call"),
    Field("weights_v", "experts/weights_v", 2, "weights read, call of a round / plain call"),
    Field("of peak", "bandwidth/target_share_of_peak", 2, about="bytes that a target step reads / the measured peak"),
    Field("operations", "operations_factor", 2, "operations, predicted", "of plain decoding's (Theorem 3.11)"),
    Field("draft_acceptance_rate", "draft_acceptance_rate", heading="draft acceptance rate (not alpha)"),
    Field("drift", "drift/tv", heading="drift, total variation"),
    Field("drift_kl", "drift/kl", heading="drift, KL in nats"),
    Field("drift_bound", "drift/bound", heading="largest s(x) l / p(x)"),
    Field("repetition", "drift/repetition", heading="repeated 4-grams"),
    Field("baseline_repetition", "drift/baseline_repetition", heading="of plain decoding"),
    Field("distinct_2", "drift/distinct_2", heading="distinct 2-grams"),
    Field("baseline_distinct_2", "drift/baseline_distinct_2", heading="of plain decoding "),
    Field("tokens", "counts/tokens", 0),
    Field("beside", "placement/beside", 0, about="other jobs that had cores of the machine"),
    Field("lossless", "lossless/verdict"),
    Field("seed", "config/seed", 0),
    Field("order", "config/order"),
    Field("started", "provenance/started"),
)}  # fmt: skip
ALSO = {"MAT": "tau", "block_efficiency": "tau", "theorem_3_8": "Thm 3.8"}  # other names of fields
SUMMARY = ("alpha", "stderr", "tau", "c", "v", "o", "speedup", "low", "high", "processes", "sd", "Thm 3.8",
           "tokens/s", "plain tokens/s", "of peak", "beside", "lossless")  # columns of summary.csv  # fmt: skip
REPEATS = ("seed", "order", "speedup", "low", "high", "alpha", "tau", "c", "v", "o", "target step seconds", "tokens/s",
           "plain tokens/s", "started")  # of repeats.csv, behind `process`  # fmt: skip
SWEEP_PAGE = ("Thm 3.8", "alpha", "stderr", "tau", "c", "v", "o", "tokens/s", "plain tokens/s", "of peak", "processes")
RUN_PAGE = [name for name in FIELDS if name not in {
    "stderr", "low", "high", "processes", "sd", "beside", "lossless", "seed", "order", "started"}]  # fmt: skip
OF_DRAFTS = ("tau", "tau_of_requests", "v")  # numbers that say nothing where nothing was drafted
LOGGED = {"alpha": "alpha/mean", "alpha_stderr": "alpha/stderr", "c": "cost/c", "v": "cost/v", "o": "cost/o",
          "block_efficiency": "block_efficiency/mean"}  # columns of W&B with names of their own  # fmt: skip
LOGGED_WHOLE = ("speedup", "cost", "lossless", "throughput", "throughput_ci95", "speedup_over", "bandwidth", "drift",
                "latency", "memory", "counts", "metrics", "alpha_counted", "alpha_on_target_text", "alpha_by_category",
                "operations_factor", "optimal_gamma", "regret", "draft_acceptance_rate", "recording",
                "status")  # there with all that is below them  # fmt: skip

FACTORS = {  # of `speedup.accounting`: in a table, and in the sentence on what is lost
    "theorem_3_8": ("Theorem 3.8", ""),
    "short_drafts": ("shorter drafts", "drafts shorter than gamma"),
    "stops": ("texts that end", "texts that end"),
    "dependence": ("betas are not i.i.d.", "betas that are not i.i.d."),
    "luck": ("luck", ""),
    "drafting": ("drafting is not g c", "drafting beyond gamma c"),
    "verify": ("verifying", "verification"),
    "rest": ("the rest of a round", "the rest of a round"),
    "plain_rest": ("the rest of a plain step", ""),
    "rows": ("rows a call", "fewer rows a call"),
}
CAUSES = {  # factors of the ratio of two runs
    "alpha": "alpha",
    "gamma": "gamma",
    "other_tokens": "other tokens",
    "c": "drafting",
    "v": "verifying",
    "o": "rest",
    "plain_rest": "plain's rest",
    "plain": "plain's speed",
}
UNITS = {"tokens_per_second": "tokens per second", "speedup": "speedup over plain decoding"}  # what is ranked


def values(result: ResultDict, names: tuple[str, ...]) -> dict[str, Any]:
    """These fields of a run's results, by name."""
    return {name: FIELDS[name].of(result) for name in names}


def metrics(result: ResultDict) -> dict[str, Any]:
    """The numbers of the group `metric`, as {"metric/number": value}."""
    return flatten(result.get("metrics", {}))
