"""From decoded batches to a RunResult: every rate is derived here, from raw counts and times."""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from specbench import theory
from specbench.measure.acceptance import acceptance, alpha_by_category, alpha_on_text, beta_by_position
from specbench.measure.accounting import accounting
from specbench.measure.drift import drift
from specbench.measure.estimators import speedup_interval
from specbench.measure.latency import latency, with_latency
from specbench.measure.lossless import equality_gate, martingale_gate
from specbench.measure.replay import sweep, trace_of
from specbench.results import (
    Bandwidth,
    Cost,
    Counts,
    GammaSpeedup,
    Lossless,
    Memory,
    RoundCost,
    RunResult,
    Speedup,
    SpeedupOver,
)

if TYPE_CHECKING:
    from specbench.batch import Batch, Decoded
    from specbench.models.language_model import LanguageModel
    from specbench.run import Parts


def summarise(
    parts: Parts, batches: Sequence[Batch], too_long: int, status: str, provenance: dict[str, Any], peak: float
) -> RunResult:
    """All estimates of a run. Raises RuntimeError if every prompt failed."""
    finished = [batch for batch in batches if batch.error is None]
    if not finished:
        raise RuntimeError(f"every prompt failed, the first with {batches[0].error}")
    counts = count(batches, too_long)
    alpha, alpha_counted, efficiency = acceptance(finished)
    cost = costs(finished, parts.costs.summary())
    drafted = counts.drafted / counts.rounds
    gamma = drafted if parts.policy.constant is None else parts.policy.constant
    known, trees = None not in (alpha.mean, cost.c), getattr(parts.drafter, "trees", False)
    c_hat = getattr(parts.drafter, "operations_per_token", 0) / parts.target.operations_per_token
    ours = _times(finished, "speculative")
    measured, ci95 = speedup_interval(*_times(finished, "baseline"), *ours)
    peers = {name: _peer_times(finished, name) for name in parts.peers.names}
    speedup = Speedup(
        measured=measured,
        ci95=ci95,
        end_to_end=_end_to_end(finished),
        theorem_3_8=theory.walltime_improvement(alpha.mean, gamma, cost.c) if known else None,
        corrected=theory.corrected_improvement(efficiency.mean, drafted, cost.c or 0.0, cost.v, cost.o),
        accounting=accounting(finished, parts.policy.constant),
    )
    gammas = gamma_sweep(finished, cost.by_gamma, measured)
    return RunResult(
        name=parts.name,
        status=status,
        config=parts.config,
        provenance=provenance,
        alpha=alpha,
        alpha_counted=alpha_counted,
        alpha_on_target_text=alpha_on_text(finished, "baseline"),
        beta_by_position=beta_by_position(finished),
        alpha_by_category=alpha_by_category(finished),
        draft_acceptance_rate=counts.accepted / counts.drafted if counts.drafted else None,
        block_efficiency=efficiency,
        cost=cost,
        speedup=speedup,
        # Theorem 3.11 counts a chain's operations.
        operations_factor=theory.operations_factor(alpha.mean, gamma, c_hat) if known and not trees else None,
        optimal_gamma=theory.optimal_gamma(alpha.mean, cost.c) if known else None,
        gamma=parts.policy.constant,
        gamma_sweep=gammas,
        regret=regret(gammas, parts.policy.constant),
        lossless=gate(parts, finished),
        throughput={
            "speculative_tokens_per_second": counts.tokens / sum(b.speculative.decode_seconds for b in finished),
            "baseline_tokens_per_second": counts.baseline_tokens / sum(b.baseline.decode_seconds for b in finished),
        }
        | {f"{name}_tokens_per_second": sum(tokens) / sum(seconds) for name, (seconds, tokens) in peers.items()},
        speedup_over={name: SpeedupOver(*speedup_interval(*times, *ours)) for name, times in peers.items()},
        bandwidth=bandwidth(parts, finished, cost, peak),
        recording=sum(b.speculative.record_seconds for b in finished)
        / sum(b.speculative.decode_seconds for b in finished),
        drift=drift(finished, parts.target.sampling.greedy),
        latency={
            way: latency(decoded)
            for way in ("speculative", "baseline")
            if (decoded := [(r, d) for b in finished for r, d in with_latency(getattr(b, way))])
        },
        memory=memory(parts, finished),
        counts=counts,
        notes=parts.notes,
    )


def count(batches: Sequence[Batch], too_long: int) -> Counts:
    counts = Counts(too_long=too_long)
    for batch in batches:
        if batch.error is not None:
            counts.failed += len(batch.requests)
            continue
        counts.prompts += len(batch.requests)
        counts.baseline_tokens += sum(map(len, batch.baseline.tokens))
        for r in batch.speculative.rounds:
            counts.rounds += 1
            counts.drafted += r.gamma
            counts.verified += r.width
            for name in ("tokens", "tested", "accepted", "recovered", "bonus", "accepted_before_stop"):
                setattr(counts, name, getattr(counts, name) + getattr(r, name))
    return counts


def costs(finished: Sequence[Batch], by_gamma: list[RoundCost]) -> Cost:
    """c, v and o: means over all rounds, in steps of the baseline's single-token target calls."""
    step = _mean([lap["verify"] for b in finished for lap in b.baseline.laps])
    laps = [lap for b in finished for lap in b.speculative.laps]
    steps = round(sum(r.steps / r.rows for b in finished for r in b.speculative.rounds))
    drafter_step = sum(lap["draft"] for lap in laps) / steps if steps else None
    verify = _mean([lap["verify"] for lap in laps])
    return Cost(
        c=drafter_step / step if drafter_step is not None else None,
        v=verify / step,
        o=_mean([lap["accept"] + lap["host"] for lap in laps]) / step,
        target_step_seconds=step,
        drafter_step_seconds=drafter_step,
        verify_seconds=verify,
        by_gamma=by_gamma,
    )


def gamma_sweep(finished: Sequence[Batch], costs: list[RoundCost], measured: float) -> list[GammaSpeedup]:
    """What every constant gamma up to the largest measured one would have given, by replay."""
    trace = trace_of(finished, costs, measured)
    return [GammaSpeedup(g, r.speedup, r.ci95) for g, r in sweep(trace).items()] if trace.texts else []


def regret(gammas: list[GammaSpeedup], chosen: int | None) -> float | None:
    """By how much the best constant gamma beats the chosen one, both by replay: 0.05 is 5 %."""
    ours = next((g.speedup for g in gammas if g.gamma == chosen), None)
    return None if ours is None else max(g.speedup for g in gammas) / ours - 1


def bandwidth(parts: Parts, finished: Sequence[Batch], cost: Cost, peak: float) -> Bandwidth:
    """What one step has to read, weights and the keys and values of every row, over its time."""
    rounds = [(b, r) for b in finished for r in b.baseline.rounds]
    columns = sum(r.position + len(b.requests[r.row].tokens) for b, r in rounds) / sum(1 / r.rows for _, r in rounds)
    drafters = getattr(parts.drafter, "models", [])
    drafter = drafters[0] if len(drafters) == 1 else None

    def rate(model: LanguageModel | None, seconds: float | None) -> float | None:
        return None if model is None or not seconds else (model.step_bytes + columns * model.column_bytes) / seconds

    ours = rate(parts.target, cost.target_step_seconds)
    return Bandwidth(ours, rate(drafter, cost.drafter_step_seconds), peak, ours / peak)


def gate(parts: Parts, finished: Sequence[Batch]) -> Lossless:
    expected = parts.verifier.lossless
    if not parts.target.sampling.greedy:
        rounds = [r for b in finished for r in b.speculative.rounds]
        return martingale_gate(rounds, expected)
    return equality_gate(
        [request.tokens for b in finished for request in b.requests],
        [tokens for b in finished for tokens in b.speculative.tokens],
        [tokens for b in finished for tokens in b.baseline.tokens],
        parts.target,
        parts.dtype,
        expected,
    )


def memory(parts: Parts, finished: Sequence[Batch]) -> Memory:
    if parts.target.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(parts.target.device)
    else:
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    weights = parts.target.weight_bytes + sum(m.weight_bytes for m in getattr(parts.drafter, "models", []))
    weights += parts.target.executor.bytes()
    return Memory(peak, weights, max(b.speculative.kv_bytes for b in finished))


def _times(finished: Sequence[Batch], way: str) -> tuple[list[float], list[int]]:
    """Decoding seconds and tokens of every request."""
    decoded = [getattr(batch, way) for batch in finished]
    rows = [(d, row) for d in decoded for row in range(len(d.tokens))]
    return [d.seconds_of(row) for d, row in rows], [len(d.tokens[row]) for d, row in rows]


def _peer_times(finished: Sequence[Batch], name: str) -> tuple[list[float], list[int]]:
    outputs = [output for batch in finished for output in batch.peers[name]]
    return [output.decode_seconds for output in outputs], [output.decoded for output in outputs]


def _end_to_end(finished: Sequence[Batch]) -> float:
    def seconds_per_token(ways: list[Decoded]) -> float:
        return sum(d.prefill_seconds + d.decode_seconds for d in ways) / sum(len(t) for d in ways for t in d.tokens)

    return seconds_per_token([b.baseline for b in finished]) / seconds_per_token([b.speculative for b in finished])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
