"""The result of several processes on the same prompts: every ratio from their pooled sums, as for one run."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from specbench import theory
from specbench.decoding.search import Decoding
from specbench.peers.base import Peers
from specbench.results.schema import Counts, Repeats
from specbench.stats.accounting import accounting, cost_ratios, speedup_of
from specbench.stats.breakdown import acceptance_of, by_rows, category_numbers, geometric_speedup, user_rates
from specbench.stats.holdout_prediction import prediction
from specbench.stats.request_sums import (
    BETA_AT,
    SECONDS_OF,
    TESTED_AT,
    TOKENS_OF,
    bandwidths,
    drifts,
    end_to_end,
    prefills,
    rates,
)
from specbench.stats.two_way_bootstrap import TwoWaySums, spread

WORST = ("failed", "inconclusive", "untested", "lossy", "passed")  # verdicts, the worst first
SUMMED = ("rounds", "tokens", "drafted", "tested", "accepted", "recovered", "bonus", "accepted_before_stop", "verified")

Tree = dict[str, Any]


def pooled(
    results: Sequence[Tree],
    sums: TwoWaySums,
    by_category: Mapping[str, TwoWaySums],
    peers: type[Peers] = Peers,
    decoding: type[Decoding] = Decoding,
) -> Tree:
    """The contents of results.json for the results of several processes, as they stand in theirs, and the sums of all
    of them; `by_category` are those of each category of prompts, `peers` and `decoding` the classes that were chosen
    in the groups `baseline` and `decoding`. Replay, times of rounds by gamma and what else needs
    texts and rounds stays the first process'."""
    first = results[0]
    gamma = first["gamma"] if len({result["gamma"] for result in results}) == 1 else None
    alpha = asdict(sums.estimate("beta", "tested"))
    cost = first["cost"] | _costs(sums)
    drafted = float(sums.point["drafted"] / sums.point["rounds"])
    known = alpha["mean"] is not None and cost["c"] is not None and np.isfinite(alpha["mean"])
    return first | {
        "status": "complete",
        "provenance": first["provenance"] | {"seconds": sum(r["provenance"]["seconds"] for r in results)},
        "alpha": alpha,
        "alpha_counted": asdict(sums.estimate("accepted", "tested")),
        "alpha_on_target_text": asdict(sums.estimate("text_beta", "text_tested")),
        "beta_by_position": _by_place(sums),
        "alpha_by_category": {name: asdict(own.estimate("beta", "tested")) for name, own in by_category.items()},
        "draft_acceptance_rate": _ratio(sums, "accepted", "drafted"),
        "block_efficiency": asdict(sums.estimate("tokens", "rounds")),
        "cost": cost,
        "speedup": _speedup(sums, first, gamma, alpha["mean"], cost, drafted),
        "operations_factor": mean([result["operations_factor"] for result in results]),
        "optimal_gamma": theory.optimal_gamma(alpha["mean"], cost["c"]) if known else None,
        "gamma": gamma,
        "lossless": _worst([result["lossless"] for result in results]),
        "throughput": _throughput(sums, first),
        "throughput_ci95": sums.intervals(rates) | sums.intervals(user_rates),
        "throughput_by_rows": [asdict(found) for found in by_rows(sums)],
        "by_category": {name: asdict(category_numbers(own)) for name, own in by_category.items()},
        "acceptance": asdict(acceptance_of(sums, with_beta=False)) | {"check": first["acceptance"]["check"]},
        "speedup_over": {name: _over(sums, name) for name in first["speedup_over"]},
        "bandwidth": _bandwidth(sums, results),
        "recording": _ratio(sums, "record_seconds", "seconds"),
        "drift": _drift(sums, results),
        "latency": means([result["latency"] for result in results]),
        "servers": {
            name: peers.pooled_numbers([result["servers"][name] for result in results])
            for name in first.get("servers", {})
            if all(name in result["servers"] for result in results)
        },
        "memory": {name: max(result["memory"][name] for result in results) for name in first["memory"]},
        "counts": _counts(sums, results),
        "beam": decoding.pooled_numbers([result["beam"] for result in results if result.get("beam")]),
        "machine": worst_machine({f"process {n}": result["machine"] for n, result in enumerate(results, 1)}),
        "metrics": means([result["metrics"] for result in results]),
        "seconds": _added([result.get("seconds", {}) for result in results]),
        "notes": list(dict.fromkeys(note for result in results for note in result["notes"])),
    }


def _added(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Sums by name."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: sum(part.get(name, 0.0) for part in parts) for name in names}


def repeats_of(results: Sequence[Tree], sums: TwoWaySums, vary: str, failed: int) -> Tree:
    """The field `repeats`."""
    values = sums.by_process(lambda s: {"speedup": speedup_of(s), **cost_ratios(s), **rates(s)})
    sd = {name: spread(found) for name, found in values.items()}
    return asdict(Repeats(len(results), failed, vary, sd, Counts(**results[0]["counts"])))


def _speedup(sums: TwoWaySums, first: Tree, gamma: int | None, alpha: float, cost: Tree, drafted: float) -> Tree:
    s, known = sums.point, first["speedup"]["theorem_3_8"] is not None
    predicted = prediction(of_clusters := sums.of_clusters(), range(len(of_clusters["tokens"])))
    whole = {f"{way}tokens": s[f"{way}tokens"] for way in ("", "plain_")}
    own = s["plain_seconds"] / s["plain_step_seconds"]
    efficiency = s["tokens"] / s["rounds"]
    chosen = drafted if gamma is None else gamma
    found: Tree = first["speedup"] | {
        "measured": float(speedup_of(s)),
        "ci95": sums.intervals(lambda s: {"measured": speedup_of(s)})["measured"],
        "end_to_end": float(end_to_end(s)["end_to_end"]),
        "end_to_end_ci95": sums.intervals(end_to_end)["end_to_end"],
        "theorem_3_8": theory.walltime_improvement(alpha, chosen, cost["c"]) if known else None,
        "corrected": float(
            own * theory.corrected_improvement(efficiency, drafted, cost["c"] or 0.0, cost["v"], cost["o"])
        ),
        "accounting": {name: asdict(factor) for name, factor in accounting(sums, gamma).items()},
        "predicted": None if predicted is None else asdict(predicted),
        "geometric_mean": asdict(geometric_speedup(sums)),
        "wall": float(speedup_of(whole | {f"{way}seconds": s[f"{way}wall_seconds"] for way in ("", "plain_")})),
    }
    return found


def _costs(sums: TwoWaySums) -> Tree:
    s = sums.point
    found = {name: None if np.isnan(value) else float(value) for name, value in cost_ratios(s).items()}
    others = s["wall_seconds"] - s["draft_seconds"] - s["verify_seconds"]
    return found | {
        "drafter_step_seconds": _ratio(sums, "draft_seconds", "steps"),
        "verify_seconds": _ratio(sums, "verify_seconds", "calls"),
        "o_wall": float(others / s["calls"] / found["target_step_seconds"]),
        "ci95": sums.intervals(cost_ratios),
        **prefills(s),
    }


def _by_place(sums: TwoWaySums) -> list[Tree]:
    """beta_by_position, as far as a guess was tested."""
    places = sorted(int(name.removeprefix(TESTED_AT)) for name in sums.point if name.startswith(TESTED_AT))
    return [asdict(sums.estimate(f"{BETA_AT}{place}", f"{TESTED_AT}{place}")) for place in places]


def _throughput(sums: TwoWaySums, first: Tree) -> dict[str, float | None]:
    peers = {f"{name}_tokens_per_second": _ratio(sums, f"{TOKENS_OF}{name}", f"{SECONDS_OF}{name}")
             for name in first["speedup_over"]}  # fmt: skip
    found = rates(sums.point) | user_rates(sums.point)
    return {name: float(value) for name, value in found.items()} | peers


def _over(sums: TwoWaySums, peer: str) -> Tree:
    """Ours over a peer."""

    def formula(s: Mapping[str, Any]) -> dict[str, Any]:
        theirs = s[f"{SECONDS_OF}{peer}"] / s[f"{TOKENS_OF}{peer}"]
        return {"over": theirs / (s["seconds"] / s["tokens"])}

    return {"measured": float(formula(sums.point)["over"]), "ci95": sums.intervals(formula)["over"]}


def _bandwidth(sums: TwoWaySums, results: Sequence[Tree]) -> Tree:
    every = [result["bandwidth"] for result in results]
    peak = float(np.median([found["measured_peak_bytes_per_second"] for found in every]))
    with np.errstate(divide="ignore", invalid="ignore"):
        found: Tree = {name: float(value) for name, value in bandwidths(sums.point).items()}
    found = {name: value if np.isfinite(value) else None for name, value in found.items()}
    share = found["target_bytes_per_second"] / peak if found["target_bytes_per_second"] else None
    roofs = {"measured_peak_bytes_per_second": peak, "target_share_of_peak": share}
    found |= roofs | {"ci95": sums.intervals(bandwidths)}
    return {**every[0], **found}


def _drift(sums: TwoWaySums, results: Sequence[Tree]) -> Tree:
    found = means([{name: value for name, value in result["drift"].items() if name != "ci95"} for result in results])
    bounds = [result["drift"]["bound"] for result in results if result["drift"]["bound"] is not None]
    found |= {name: _ratio(sums, f"drift_{name}", "drift_tested") for name in ("tv", "kl")}
    return found | {"bound": max(bounds, default=None), "ci95": sums.intervals(drifts)}


def _counts(sums: TwoWaySums, results: Sequence[Tree]) -> dict[str, int]:
    found = {name: round(float(sums.point[name])) for name in SUMMED}
    found["baseline_tokens"] = round(float(sums.point["plain_tokens"]))
    others = Counter({name: 0 for name in ("prompts", "failed", "too_long")})
    for result in results:
        others.update({name: result["counts"][name] for name in others})
    return asdict(Counts(**others, **found))


def _worst(verdicts: Sequence[Tree]) -> Tree:
    """The worst verdict, with the number of its process in its reason."""
    place = min(range(len(verdicts)), key=lambda i: WORST.index(verdicts[i]["verdict"]))
    found = verdicts[place]
    if found["verdict"] == "passed" or len({verdict["verdict"] for verdict in verdicts}) == 1:
        return found
    return found | {"reason": f"process {place + 1}: {found['reason']}" if found["reason"] else f"process {place + 1}"}


def worst_machine(machines: Mapping[str, Tree]) -> Tree:
    """Of what was known of the machine in several processes, by their names: steady if it was so in all, and of each
    number the one furthest from 0."""
    every = [*machines.values()]
    names = [name for name in every[0] if name not in ("steady", "reasons")]
    alike: dict[str, list[str]] = {}  # reasons that differ in their numbers alone
    for whose, machine in machines.items():
        for told in machine["reasons"]:
            alike.setdefault(re.sub(r"\d+", "", told), []).append(f"{whose}: {told}")
    found: Tree = {
        "steady": all(machine["steady"] for machine in every),
        "reasons": [told[0] + f" (and {len(told) - 1} more)" * (len(told) > 1) for told in alike.values()],
    }
    return found | {name: max((m[name] for m in every if m[name] is not None), key=abs, default=None) for name in names}


def _ratio(sums: TwoWaySums, above: str, below: str) -> float | None:
    denominator = float(sums.point.get(below, 0.0))
    value = float(sums.point.get(above, 0.0)) / denominator if denominator else np.nan
    return value if np.isfinite(value) else None


def mean(values: Sequence[float | None]) -> float | None:
    """The mean of those that there are."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def means(trees: Sequence[Tree]) -> Tree:
    """Trees of numbers of the same shape: the mean at each place."""
    return {
        name: means([tree[name] for tree in trees if name in tree])
        if isinstance(value, dict)
        else mean([tree.get(name) for tree in trees])
        for name, value in trees[0].items()
    }
