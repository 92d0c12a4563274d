"""Which way of a comparison is fastest, in a sentence."""

from collections.abc import Mapping
from typing import Any

from specbench.results.report.run_description import doubts, label, left_out, none_left
from specbench.results.tables import interval, word

MOST_NAMES = 4  # of ways in a sentence
Found = Mapping[str, Any]  # one entry of comparison.json, with the `result` of each of its runs


def ranking(found: Found) -> str:
    """Which way is fastest, in a sentence; ways that failed the losslessness test are counted and not ranked."""
    results = [run["result"] for run in found["runs"]]
    where = f"At {label(found['task'])}: " if found["task"] else ""
    ranked = [run for run in found["runs"] if word(run["result"]["lossless"]) != "failed"]
    if not ranked:
        return f"{where}{none_left(len(results), 'ways')}."
    (first, *others), failed = ranked, left_out(len(results) - len(ranked))
    speedup, ci95 = first["numbers"]["speedup"], first["ci95"].get("speedup")
    ways = f"{len(ranked)} way{'s' * (len(ranked) > 1)}{failed}"
    measured = f"{speedup:.2f}x plain decoding's speed" + (f" ({interval(ci95)})" if ci95 else "")
    told = f"{first['label']} is the fastest of {ways}: {measured}"
    if not tested(found):
        told = f"Too few prompts to say which of {ways} is the fastest; {first['label']} measured {measured}"
    elif ties := [run["label"] for run in others if run["rank"] <= first["rank"]]:
        names = ", ".join(ties) if len(ties) <= MOST_NAMES else f"{len(ties)} others"
        told += f"; not told apart from {names}"
    return f"{where}{told}{doubts(results, first['result'])}."


def tested(found: Found) -> bool:
    """Whether there were enough prompts for tests of the differences."""
    return any(pair["p_value"] is not None for pair in found["pairs"])
