"""The result of several processes on the same prompts: what their sums give, and what else stands in each result."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from specbench.decoding.search import Decoding
from specbench.run.phase_timer import summed
from specbench.run.strict_verdict import of_several
from specbench.stats.derive import LoadSums, RunFacts, derive
from specbench.stats.estimates import Counts, Repeats
from specbench.stats.formulas import cost_ratios, rates, speedup_of
from specbench.stats.gamma_sweep import not_steady
from specbench.stats.two_way_bootstrap import TwoWaySums, relative_sd

WORST = ("failed", "inconclusive", "untested", "lossy", "passed")  # verdicts, the worst first
BAD = (False, None, True)  # `passed` of verdicts on alpha, likewise
OF_ROUNDS = ("by_gamma", "halves", "read_again", "communication")  # costs that no sums give

ResultTree = dict[str, Any]


def pooled(results: Sequence[ResultTree], load: LoadSums, decoding: type[Decoding] = Decoding) -> ResultTree:
    """The contents of results.json for several processes, from theirs and from `load`, which gives the sums of each;
    `decoding` is the chosen class. What needs texts and rounds stays the first process'."""
    first, facts = results[0], _facts(results)
    found = derive(load, TwoWaySums.of, facts)
    own = asdict(found)
    copied = first["bandwidth"]["copy_bytes_per_second"]
    machine = worst_machine({f"process {n}": result["machine"] for n, result in enumerate(results, 1)})
    nothing: ResultTree = {"gamma_sweep": [], "gamma_pick": None, "regret": None}
    nothing["no_replay"] = first["no_replay"] or not_steady(machine["reasons"])
    texts = means([{n: v for n, v in result["drift"].items() if n not in ("ci95", "bound")} for result in results])
    bounds = [result["drift"]["bound"] for result in results if result["drift"]["bound"] is not None]
    return {
        **first,
        **own,
        "status": "complete",
        "provenance": first["provenance"] | {"seconds": sum(r["provenance"]["seconds"] for r in results)},
        "cost": own["cost"] | {name: first["cost"][name] for name in OF_ROUNDS},
        "operations_factor": mean([result["operations_factor"] for result in results]),
        "gamma": facts.gamma,
        "lossless": worst_verdict(results),
        "acceptance": own["acceptance"] | {"check": first["acceptance"]["check"]},
        "bandwidth": own["bandwidth"] | {"copy_bytes_per_second": copied},
        "drift": texts | {"bound": max(bounds, default=None)} | found.drift,
        "latency": means([result["latency"] for result in results]),
        "memory": {name: max(result["memory"][name] for result in results) for name in first["memory"]},
        "beam": decoding.pooled_numbers([result["beam"] for result in results if result["beam"]]),
        "machine": machine,
        **({} if machine["steady"] else nothing),
        "metrics": means([result["metrics"] for result in results]),
        "seconds": summed([result["seconds"] for result in results]),
        "notes": list(dict.fromkeys(note for result in results for note in result["notes"])),
    }


def _facts(results: Sequence[ResultTree]) -> RunFacts:
    """What `derive` must know beside the sums. Acceptance is not checked: prompts are the same in all processes."""
    gammas = {result["gamma"] for result in results}
    failed, too_long = (sum(result["counts"][name] for result in results) for name in ("failed", "too_long"))
    peaks = [result["bandwidth"]["measured_peak_bytes_per_second"] for result in results]
    return RunFacts(results[0]["gamma"] if len(gammas) == 1 else None, False, float(np.median(peaks)), failed, too_long)


def repeats_of(results: Sequence[ResultTree], load: LoadSums, vary: str, failed: int) -> ResultTree:
    """The field `repeats`."""
    values = TwoWaySums.of(load).by_process(lambda s: {"speedup": speedup_of(s), **cost_ratios(s), **rates(s)})
    sd = {name: relative_sd(found) for name, found in values.items()}
    return asdict(Repeats(len(results), failed, vary, sd, Counts(**results[0]["counts"])))


def worst_verdict(results: Sequence[ResultTree]) -> ResultTree:
    """The worst verdict, with the number of its process in its reason, and the worst on alpha. With another seed a
    process has texts of its own, and its verdict is one of several tests."""
    tests = len({result["config"]["seed"] for result in results})
    judged = [of_several(result["lossless"], tests) for result in results]
    number, found = min(enumerate(judged, 1), key=lambda numbered: WORST.index(numbered[1]["verdict"]))
    found |= {"alpha_own": min((v["alpha_own"] for v in judged), key=lambda own: BAD.index(own["passed"]))}
    if found["verdict"] == "passed" or len({verdict["verdict"] for verdict in judged}) == 1:
        return found
    return found | {"reason": f"process {number}: {found['reason']}" if found["reason"] else f"process {number}"}


def worst_machine(machines: Mapping[str, ResultTree]) -> ResultTree:
    """Of what was known of the machine in several processes, by their names: steady if it was so in all, and of each
    number the one furthest from 0."""
    every = [*machines.values()]
    names = [name for name in every[0] if name not in ("steady", "reasons")]
    alike: dict[str, list[str]] = {}  # reasons that differ in their numbers alone
    for whose, machine in machines.items():
        for told in machine["reasons"]:
            alike.setdefault(re.sub(r"\d+", "", told), []).append(f"{whose}: {told}")
    found: ResultTree = {
        "steady": all(machine["steady"] for machine in every),
        "reasons": [told[0] + f" (and {len(told) - 1} more)" * (len(told) > 1) for told in alike.values()],
    }
    return found | {name: max((m[name] for m in every if m[name] is not None), key=abs, default=None) for name in names}


def mean(values: Sequence[float | None]) -> float | None:
    """The mean of those that there are."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def means(trees: Sequence[ResultTree]) -> ResultTree:
    """Trees of numbers of the same shape: the mean at each place."""
    return {
        name: means([tree[name] for tree in trees if name in tree])
        if isinstance(value, dict)
        else mean([tree.get(name) for tree in trees])
        for name, value in trees[0].items()
    }
