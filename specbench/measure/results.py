"""From records and facts to `results.json`: the one function that computes the numbers of a run, however it ran."""

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from specbench import theory
from specbench.measure import breakdown, formulas
from specbench.measure.record import SCHEMA_VERSION, Facts, Record
from specbench.measure.sums import FEWEST, Sample, finished, prompts_frame, rounds_without_room
from specbench.measure.verdict import judge

ABSTAINS = 0.8  # share of gamma below which a note says how many guesses rounds had
STEADY = 0.15  # relative change of plain decoding's pace over a run above which a note says so


def results(records: Sequence[Record], facts: Facts) -> dict[str, Any]:
    """All numbers of a run under the names of `schema.FIELDS`. Raises RuntimeError if no request was finished."""
    frame = prompts_frame(records)
    if not len(frame):
        errors = [record.failed for record in records if record.failed]
        raise RuntimeError(f"every prompt failed, the first with {errors[0]}" if errors else "no prompt was decoded")
    run = Sample(frame)
    total = run.total
    accepted, cost = run.of_tokens(formulas.acceptance), run.of_times(formulas.costs)
    efficiency = run.of_tokens(formulas.block_efficiency)["block_efficiency"]
    over_peers, verdict = run.of_times(formulas.speedups_over_peers), judge(records, facts)
    rates = formulas.tokens_per_second(total)
    alpha, c = accepted["alpha"].value, cost["c"].value
    return {
        "schema_version": SCHEMA_VERSION,
        "name": facts.name,
        "status": facts.status,
        "config": facts.config,
        "provenance": facts.provenance,
        "alpha": breakdown.mean_of(accepted["alpha"], total["tested"]),
        "alpha_counted": breakdown.mean_of(accepted["alpha_counted"], total["tested"]),
        "alpha_on_target_text": breakdown.mean_of(accepted["alpha_on_target_text"], total.get("text positions", 0)),
        "draft_acceptance_rate": accepted["draft_acceptance_rate"].value,
        "block_efficiency": {"mean": efficiency.value, "stderr": efficiency.stderr},
        "cost": {name: e.value for name, e in cost.items()} | {"ci95": {name: e.ci95 for name, e in cost.items()}},
        "speedup": _speedup(run, facts.gamma),
        "operations_factor": _operations_factor(total, facts, alpha),
        "optimal_gamma": None if alpha is None or c is None else theory.optimal_gamma(alpha, c),
        "acceptance": breakdown.acceptance(run),
        "by_category": breakdown.by_category(frame),
        "lossless": {name: verdict[name] for name in ("expected", "passed", "reason", "detectable")},
        "throughput": {name: float(rate) for name, rate in rates.items()},
        "speedup_over": {name: {"measured": e.value, "ci95": e.ci95} for name, e in over_peers.items()},
        "bandwidth": {
            "target_bytes_per_second": formulas.bandwidth(total, facts.step_bytes, facts.column_bytes) or None,
            "measured_peak_bytes_per_second": facts.peak_bytes_per_second or None,
        },
        "memory": facts.memory,
        "latency": breakdown.latency(records, facts.batch_size),
        "counts": {
            "prompts": len(frame),
            **{name: round(total[name]) for name in ("rounds", "tokens", "tested", "accepted", "recovered", "bonus")},
            "drafted": round(total["gamma"]),
            "failed": len(records) - len(frame),
        },
        "notes": [*facts.notes, *_notes(records, run, facts), *verdict["notes"]],
        "details": _details(records, run, facts) | {"verdict": verdict["details"]},
    }


def facts_of(stored: dict[str, Any]) -> Facts:
    """The facts that a `results.json` was made with."""
    return Facts(**stored["details"]["facts"] | {name: stored[name] for name in ("config", "provenance")})


def _speedup(run: Sample, gamma: int | None) -> dict[str, Any]:
    """The speedup, its predictions and the factors between them; none of these if no guess was tested."""
    found = run.of_times(formulas.speedups)
    causes = run.of_times(lambda s: formulas.accounting(s, gamma)) if run.total["tested"] else {}
    if any(estimate.value is None for estimate in causes.values()):
        causes = {}
    return {
        "measured": found["measured"].value,
        "ci95": found["measured"].ci95,
        "end_to_end": found["end_to_end"].value,
        "end_to_end_ci95": found["end_to_end"].ci95,
        "theorem_3_8": causes["theorem_3_8"].value if causes else None,
        "corrected": run.of_times(lambda s: formulas.corrected(s, gamma))["corrected"].value,
        "accounting": [
            {"factor": name, "value": estimate.value, "ci95": estimate.ci95} for name, estimate in causes.items()
        ],
    }


def _operations_factor(total: dict[str, float], facts: Facts, alpha: float | None) -> float | None:
    """Theorem 3.11, which counts a chain's operations."""
    if facts.c_hat is None or alpha is None or total["gamma"] != total["drafted"]:
        return None
    gamma = total["gamma"] / total["rounds"] if facts.gamma is None else facts.gamma
    return theory.operations_factor(alpha, gamma, facts.c_hat)


def pace_drift(records: Sequence[Record]) -> float | None:
    """How much slower plain decoding is in the second half of a run's requests; .1 is 10 %. None with fewer than 8."""
    paces = [record.baseline.seconds / len(record.baseline.ids) for record in finished(records) if record.baseline]
    if len(paces) < 8:
        return None
    first, second = np.median(paces[: len(paces) // 2]), np.median(paces[len(paces) // 2 :])
    return float(second / first - 1) if first else None


def _notes(records: Sequence[Record], run: Sample, facts: Facts) -> list[str]:
    """What the records themselves say that a reader must know."""
    notes = []
    errors = Counter(record.failed for record in records if record.failed)
    if errors:
        error, times = errors.most_common(1)[0]
        notes.append(f"{sum(errors.values())} of {len(records)} prompts failed, {times} with: {error}")
    done = finished(records)
    for name in sorted({name for record in records for name in record.peers}):
        failed = [record.peers[name]["error"] for record in done if "error" in record.peers.get(name, {})]
        if failed:
            notes.append(f"{name} failed for {len(failed)} of {len(done)} prompts, first with: {failed[0]}")
        texts = [(record.peers.get(name, {}).get("ids"), record.baseline) for record in done]
        other = sum(ids is not None and plain is not None and ids != plain.ids for ids, plain in texts)
        if facts.greedy and other:
            notes.append(f"{name} decoded another text than plain decoding for {other} of {len(done)} prompts")
    if facts.drafter_context is not None:
        without = rounds_without_room(records, facts.drafter_context, facts.begin)
        if without:
            rounds = round(run.total["rounds"])
            reason = f"the drafter's context of {facts.drafter_context} tokens had no room for a guess"
            notes.append(f"{without} of {rounds} rounds had no draft: {reason}")
    change = pace_drift(records)
    if change is not None and abs(change) > STEADY:
        notes.append(f"plain decoding's time per token changed by {change:+.0%} over the run; decoding the methods in "
                     "turn guards the speedup against it")  # fmt: skip
    if len({*run.times}) < FEWEST:
        notes.append(f"intervals need {FEWEST} prompts, groups of a batch or processes that were decoded apart; here "
                     f"are {len({*run.times})}: give more prompts, or repeats=5")  # fmt: skip
    gamma = run.total["gamma"] / max(run.total["rounds"], 1)
    if facts.gamma and gamma < ABSTAINS * facts.gamma:
        notes.append(f"a round had {gamma:.1f} guesses of gamma={facts.gamma} on average: alpha is of those alone, and "
                     "Theorem 3.8 assumes all of them")  # fmt: skip
    return notes


def prompts_hash(records: Sequence[Record]) -> str:
    """A hash of the prompts as the models read them: equal if two runs had the same ones, in whatever order."""
    known = sorted({(record.id, record.prompt) for record in records})
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()


def _details(records: Sequence[Record], run: Sample, facts: Facts) -> dict[str, Any]:
    total = run.total
    return {
        "facts": dataclasses.asdict(facts),
        "prompts": {"template": facts.template, "sha256": prompts_hash(records)},
        "batch_invariant": facts.batch_invariant,
        "choices": facts.choices,
        "overrides": facts.overrides,
        "clusters": len({*run.times}),
        "processes": len({*run.frame["process"]}),
        "prefill_seconds": total["prefill_seconds"] / total["requests"],
        "plain_prefill_seconds": total["plain_prefill_seconds"] / total["requests"],
        "plain_tokens": round(total["plain_tokens"]),
        "pace_drift": pace_drift(records),
        "drift": breakdown.drift(run),
        "served": breakdown.served(records, facts.batch_size),
    }
