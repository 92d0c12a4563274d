"""Tables of finished runs as DataFrames: by run, category and method, and of a comparison."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from specbench.report.files import Run

# The others hold numbers.
TEXT_COLUMNS = ("run", "category", "method", "lossless", "row", "number", "answer", "why")
LEFT_OUT = ("config", "provenance", "details", "notes", "by_category", "acceptance", "schema_version")
VERDICTS = {True: "passed", False: "failed", None: "unknown"}


def number(value: float | None, digits: int = 3) -> str:
    """A number with so many digits, and "-" where there is none."""
    if value is None:
        return "-"
    if abs(value) >= 10**digits - 0.5:
        return f"{value:,.0f}"
    return f"{value:#.{digits}g}".removesuffix(".")


def ratio(value: float | None, interval: Sequence[float] | None) -> str:
    """A speedup with its 95 % interval, as 1.21x (1.15 to 1.28)."""
    if value is None:
        return "-"
    return f"{value:.2f}x" + (f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval else "")


def mean(estimate: Mapping[str, Any] | None) -> str:
    """A mean with its standard error."""
    if estimate is None or estimate["mean"] is None:
        return "-"
    error = estimate["stderr"]
    return f"{estimate['mean']:.3f}" + ("" if error is None else f" ± {error:.3f}")


def verdict(lossless: Mapping[str, Any]) -> str:
    """The verdict in a word or two: "lossy by choice" where the settings change the distribution."""
    if not lossless["expected"] and lossless["passed"] is not False:
        return "lossy by choice"
    return VERDICTS[lossless["passed"]]


def unchanged(results: Mapping[str, Any]) -> str:
    """What a passed verdict says of the text."""
    greedy = results["config"]["temperature"] == 0
    return "the text is plain decoding's" if greedy else "the output distribution is the target's"


def bandwidth_share(results: Mapping[str, Any]) -> str:
    """What share of the measured memory bandwidth plain decoding reads, which says how strong a baseline it is."""
    read, peak = (results["bandwidth"][f"{name}_bytes_per_second"] for name in ("target", "measured_peak"))
    return f"{read / peak:.0%}" if read and peak else ""


def milliseconds(percentiles: Mapping[str, float | None]) -> str:
    """The median and the 90th percentile of some seconds, in milliseconds."""
    if percentiles["p50"] is None:
        return "-"
    return " / ".join(number(1e3 * (percentiles[name] or 0)) for name in ("p50", "p90"))


def numbers(results: Mapping[str, Any]) -> dict[str, Any]:
    """What results.json holds, without what is no number of the whole run."""
    return {name: value for name, value in results.items() if name not in LEFT_OUT}


def by_category(runs: Sequence[Run]) -> pd.DataFrame:
    """One row for each run and category of prompts; empty if no run has two. The run is left out if it is one."""
    several = any(len(run.results["by_category"]) > 1 for run in runs)
    table = pd.DataFrame(
        {
            "run": run.label,
            "category": own["category"],
            "prompts": str(own["prompts"]),
            "speedup": ratio(own["speedup"]["measured"], own["speedup"]["ci95"]),
            "alpha": mean(own["alpha"]),
            "block efficiency": mean(own["block_efficiency"]),
            "tokens/s": number(own["speculative_tokens_per_second"]),
            "plain tokens/s": number(own["baseline_tokens_per_second"]),
        }
        for run in runs
        for own in run.results["by_category"]
        if several
    )
    return table if len(runs) > 1 else table.drop(columns="run", errors="ignore")


def methods(run: Run) -> pd.DataFrame:
    """One row for each method that decoded the prompts: speculative and plain decoding, and the peers."""
    throughput, latency, speedup = (run.results[name] for name in ("throughput", "latency", "speedup"))
    ratios = {"speculative": "", "baseline": ratio(speedup["measured"], speedup["ci95"])}
    ratios |= {name: ratio(peer["measured"], peer["ci95"]) for name, peer in run.results["speedup_over"].items()}
    waits = {"first token, ms: p50 / p90": "first_token", "per token, ms": "per_token"}
    return pd.DataFrame(
        {
            "method": "plain" if name == "baseline" else name,
            "tokens/s": number(throughput.get(f"{name}_tokens_per_second")),
            "speculative over it": over,
            **{head: milliseconds(latency[key][name]) if name in latency[key] else "-" for head, key in waits.items()},
        }
        for name, over in ratios.items()
    )


MEANING = {
    "theorem_3_8": "Theorem 3.8",
    "tokens": "tokens per round / equation 1",
    "drafting": "drafting beside gamma c",
    "verify": "verification costs v, not 1",
    "rest": "the rest of a round costs o, not 0",
    "plain_rest": "the rest of a plain step",
    "rows": "rows per call",
}


def flat(tree: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """A tree of numbers as one level, with "/" between names; an interval is two keys, low and high."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{before}{name}"
        if isinstance(value, Mapping):
            found |= flat(value, f"{key}/")
        elif isinstance(value, list | tuple):
            if len(value) == 2 and "ci95" in key:
                found |= {f"{key}/low": value[0], f"{key}/high": value[1]}
        elif value is not None:
            found[key] = value
    return found
