"""From decoded batches to a RunResult: every rate is derived here, from raw counts and times."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol

from specbench import theory
from specbench.config.memory import peak_bytes
from specbench.decoding import processes
from specbench.decoding.model import Model
from specbench.decoding.timer import Lap
from specbench.results.schema import (
    Bandwidth,
    Cost,
    Counts,
    GammaPick,
    GammaSpeedup,
    HalfCosts,
    Machine,
    Memory,
    RoundCost,
    RunResult,
    Speedup,
    SpeedupOver,
)
from specbench.run.components import Components
from specbench.run.decoder import Session
from specbench.stats.acceptance import acceptance, alpha_by_category, alpha_on_text, beta_by_position
from specbench.stats.accounting import accounting, cost_ratios, speedup_of
from specbench.stats.bandwidth import Roofs
from specbench.stats.bootstrap import FEWEST, Sums, speedup_interval
from specbench.stats.bootstrap_clusters import group_clusters, time_clusters
from specbench.stats.breakdown import BootstrapSums, acceptance_of, by_category, by_rows, geometric_speedup, user_rates
from specbench.stats.costs import half_costs
from specbench.stats.experts import woken_experts
from specbench.stats.holdout_prediction import prediction
from specbench.stats.latency import by_rate, latency
from specbench.stats.lenience_drift import drift
from specbench.stats.losslessness import judge
from specbench.stats.records import DecodedRequest, DecodeResult, Group, PerRequestSums, Result, RunRecord
from specbench.stats.replay import pick, priced, sweep_rounds, trace_of
from specbench.stats.request_sums import bandwidths, drifts, end_to_end, prefills, rates, request_sums
from specbench.stats.token_types import Tokens

Times = tuple[list[float], list[int]]  # seconds and tokens of every request


class Watch(Protocol):
    """What is known of the machine, or the machines, of a run."""

    @property
    def roofs(self) -> Roofs: ...

    def judge(self, groups: Sequence[Group]) -> Machine: ...


def summarise(session: Session, record: RunRecord, status: str, provenance: dict[str, Any], watch: Watch) -> RunResult:
    """All estimates of a run; `watch` has measured the machine. Raises RuntimeError if every prompt failed."""
    parts, results = session.parts, record.results
    if not results:
        raise RuntimeError(f"every prompt failed, the first with {record.failures[0].error}")
    counts = count(record)
    alpha, alpha_counted, efficiency = acceptance(results)
    record.sums = sums_of_run(parts, record)
    clusters = time_clusters(record, parts.batch_size)
    columns = record.sums.columns
    sums, own = Sums.of_columns(columns, clusters), BootstrapSums(record.sums)
    no_replay = why_no_replay(parts, results)
    halves = [] if no_replay else half_costs(session.costs, results, group_clusters(record))
    cost = costs(record, session.costs.summary(), halves, sums)
    drafted = counts.drafted / counts.rounds
    gamma = drafted if parts.policy.constant is None else parts.policy.constant
    c_hat = parts.drafter.operations_per_token / parts.target.operations_per_token
    measured = float(speedup_of(sums.point))
    ours = _times([r.speculative for r in results])
    peers = {name: _peer_times(results, name) for name in parts.peers}
    gammas, picked, regret = gamma_sweep(results, cost, measured, parts.policy.constant, no_replay)
    known = _Known(alpha.mean, cost.c, gamma) if alpha.mean is not None and cost.c is not None else None
    chain = parts.decoding.samples and not parts.drafter.trees  # Theorem 3.11 counts a chain's operations
    metrics, notes = of_metrics(parts, results)
    servers = {name: peer.numbers(name, results, parts.batch_size) for name, peer in parts.peers.items()}
    return RunResult(
        name=parts.name,
        status=status,
        config=parts.config,
        choices=parts.choices,
        executor=parts.target.executor.facts(),
        provenance=provenance,
        alpha=alpha,
        alpha_counted=alpha_counted,
        alpha_on_target_text=alpha_on_text(results),
        beta_by_position=beta_by_position(results),
        alpha_by_category=alpha_by_category(results),
        draft_acceptance_rate=counts.accepted / counts.drafted if counts.drafted else None,
        block_efficiency=efficiency,
        cost=cost,
        speedup=Speedup(
            measured=measured,
            ci95=sums.intervals(lambda s: {"measured": speedup_of(s)})["measured"],
            end_to_end=_time_ratio(record, lambda decoded: decoded.prefill_seconds + decoded.decode_seconds),
            theorem_3_8=theory.walltime_improvement(known.alpha, known.gamma, known.c) if known else None,
            corrected=_corrected(efficiency.mean, drafted, cost, record),
            accounting=accounting(sums, parts.policy.constant),
            predicted=prediction(columns, clusters),
            end_to_end_ci95=sums.intervals(end_to_end)["end_to_end"],
            geometric_mean=geometric_speedup(own),
            wall=_time_ratio(record, lambda decoded: decoded.wall_seconds),
        ),
        operations_factor=theory.operations_factor(known.alpha, known.gamma, c_hat) if known and chain else None,
        c_hat=c_hat,
        optimal_gamma=theory.optimal_gamma(known.alpha, known.c) if known else None,
        gamma=parts.policy.constant,
        gamma_sweep=gammas,
        gamma_pick=picked,
        no_replay=no_replay,
        regret=regret,
        lossless=parts.decoding.judge(record) or judge(record, parts.verifier.lossless, parts.target.sampling.greedy),
        throughput=throughput(record, counts, peers) | {n: float(x) for n, x in user_rates(own.point).items()},
        throughput_ci95=sums.intervals(rates) | own.intervals(user_rates),
        throughput_by_rows=by_rows(own),
        speedup_over={name: SpeedupOver(*speedup_interval(*times, *ours, clusters)) for name, times in peers.items()},
        bandwidth=replace(bandwidth(parts, results, cost, watch.roofs), ci95=sums.intervals(bandwidths)),
        recording=sum(g.speculative.record_seconds for g in record.groups) / _decode_seconds(record),
        drift=replace(drift(results), ci95=sums.intervals(drifts)),
        latency=latency(record.groups, parts.batch_size),
        latency_by_rate=by_rate(record.groups, parts.batch_size, parts.workload.limits),
        memory=memory(parts, record),
        machine=watch.judge(record.groups),
        counts=counts,
        by_category=by_category(record.sums),
        acceptance=acceptance_of(own, parts.verifier.accepts_with_beta),
        metrics=metrics,
        experts=woken_experts(parts.target, record.groups),
        servers={name: found for name, found in servers.items() if found is not None},
        beam=parts.decoding.numbers(results, parts.policy.largest, c_hat),
        notes=[
            *parts.notes,
            *parts.target.executor.notes(),
            *in_sample(gammas, picked),
            *notes,
            *(note for name, peer in parts.peers.items() for note in peer.notes(name)),
        ],
    )


def sums_of_run(parts: Components, record: RunRecord) -> PerRequestSums:
    """The sums over each request, for sums.parquet."""
    target, *drafters = (partial(_bytes, model) for model in (parts.target, *parts.drafter.models))
    drafter = drafters[0] if len(drafters) == 1 else None
    tokens = Tokens(parts.target.tokenizer, parts.target.vocab_size)
    return request_sums(record, parts.batch_size, parts.verifier.accepts_with_beta, target, drafter, tokens)


def _bytes(model: Model, calls: float, columns: float) -> float:
    """Bytes that so many one-token calls read, whose rows have so many columns in all."""
    return calls * model.step_bytes + columns * model.column_bytes()


class _Known(NamedTuple):
    """The quantities of Theorem 3.8, which exist if something was drafted."""

    alpha: float
    c: float
    gamma: float


def throughput(record: RunRecord, counts: Counts, peers: Mapping[str, Times]) -> dict[str, float]:
    """New tokens per second of decoding, all rows together: ours, of plain decoding, and of each peer."""
    plain_seconds = sum(group.baseline.decode_seconds for group in record.groups)
    return {
        "speculative_tokens_per_second": counts.tokens / _decode_seconds(record),
        "baseline_tokens_per_second": counts.baseline_tokens / plain_seconds,
        **{f"{name}_tokens_per_second": sum(tokens) / sum(seconds) for name, (seconds, tokens) in peers.items()},
    }


def _decode_seconds(record: RunRecord) -> float:
    return sum(group.speculative.decode_seconds for group in record.groups)


def count(record: RunRecord) -> Counts:
    """Sums over all rounds of all requests."""
    counts = Counts(too_long=record.too_long, failed=sum(len(failure.requests) for failure in record.failures))
    for result in record.results:
        rounds = result.speculative.rounds
        counts.prompts += 1
        counts.baseline_tokens += len(result.baseline.tokens)
        counts.rounds += len(rounds)
        counts.drafted += sum(r.gamma for r in rounds)
        counts.verified += sum(r.width for r in rounds)
        counts.tokens += sum(r.tokens for r in rounds)
        counts.tested += sum(r.tested for r in rounds)
        counts.accepted += sum(r.accepted for r in rounds)
        counts.recovered += sum(r.recovered for r in rounds)
        counts.bonus += sum(r.bonus for r in rounds)
        counts.accepted_before_stop += sum(r.accepted_before_stop for r in rounds)
    return counts


def costs(record: RunRecord, by_gamma: list[RoundCost], halves: list[HalfCosts], sums: Sums) -> Cost:
    """c, v and o: means over all rounds, in steps of the baseline's single-token target calls; `sums` are for their
    intervals."""
    ours, calls = [group.speculative.laps for group in record.groups], _calls(record)
    plain_calls = sum(group.baseline.calls for group in record.groups)
    step = sum(group.baseline.laps[Lap.VERIFY] for group in record.groups) / plain_calls
    steps = round(sum(r.steps / r.rows for result in record.results for r in result.speculative.rounds))
    drafter_step = sum(laps[Lap.DRAFT] for laps in ours) / steps if steps else None
    verify = sum(laps[Lap.VERIFY] for laps in ours) / calls
    again = sum(laps[Lap.READ_AGAIN] for laps in ours)
    others = sum(laps[Lap.WALL] - laps[Lap.DRAFT] - laps[Lap.VERIFY] for laps in ours)
    return Cost(
        c=drafter_step / step if drafter_step is not None else None,
        v=verify / step,
        o=sum(laps[Lap.ACCEPT] + laps[Lap.HOST] for laps in ours) / calls / step,
        target_step_seconds=step,
        drafter_step_seconds=drafter_step,
        verify_seconds=verify,
        by_gamma=by_gamma,
        o_wall=others / calls / step,
        ci95=sums.intervals(cost_ratios),
        **prefills(sums.point),
        halves=halves,
        read_again=again / calls / step if again else None,
        communication=processes.current.communication(
            [group.baseline.laps for group in record.groups], ours, step, calls, steps
        ),
    )


def _corrected(block_efficiency: float | None, drafted: float, cost: Cost, record: RunRecord) -> float | None:
    if block_efficiency is None or cost.v is None or cost.o is None:
        return None
    plain = [group.baseline for group in record.groups]
    own = sum(p.decode_seconds for p in plain) / sum(p.laps[Lap.VERIFY] for p in plain)
    return own * theory.corrected_improvement(block_efficiency, drafted, cost.c or 0.0, cost.v, cost.o)


def gamma_sweep(
    results: Sequence[Result], cost: Cost, measured: float, chosen: int | None, no_replay: str
) -> tuple[list[GammaSpeedup], GammaPick | None, float | None]:
    """By replay: what every constant gamma up to the largest measured one would have given, what the best of them
    gives, and the regret of the `chosen` one: 0.05 is 5 %."""
    if no_replay:
        return [], None, None
    trace = trace_of(results, cost.by_gamma, measured, cost.halves)
    rounds = sweep_rounds(trace)
    found = {g: priced(trace, of_gamma) for g, of_gamma in rounds.items()}
    picked = pick(trace, rounds)
    regret = picked.speedup / found[chosen].speedup - 1 if chosen in found else None
    return [GammaSpeedup(g, r.speedup, r.ci95) for g, r in found.items()], picked, regret


def in_sample(gammas: Sequence[GammaSpeedup], picked: GammaPick | None) -> list[str]:
    """A note, if replay chose among gammas and had too few prompts for halves."""
    if picked is None or not picked.in_sample or len(gammas) < 2:
        return []
    return [f"the best gamma by replay was chosen on the prompts it is judged on (in-sample), so it looks better than "
            f"it is: half of the prompts (or groups of rows) are fewer than {FEWEST}"]  # fmt: skip


def why_no_replay(parts: Components, results: Sequence[Result]) -> str:
    """Why the text tells nothing of another gamma; empty if it does."""
    if not any(result.speculative_laws is not None for result in results):
        return "there are no betas along its text"
    if parts.drafter.fixed_in_round:
        return "its drafter's later guesses depend on where a round began"
    if any(r.lenience < 1 for result in results for r in result.speculative.rounds):
        return "with lenience below 1 the text's distribution depends on which of its tokens were tested"
    return ""


def bandwidth(parts: Components, results: Sequence[Result], cost: Cost, roofs: Roofs) -> Bandwidth:
    """What one step has to read, weights and the keys and values of every row, over its time."""
    columns = shares = 0.0
    for result in results:
        for r in result.baseline.rounds:
            columns, shares = columns + r.position + result.request.columns, shares + 1 / r.rows
    columns /= shares
    drafter = parts.drafter.models[0] if len(parts.drafter.models) == 1 else None
    ours = _bytes_per_second(parts.target, columns, cost.target_step_seconds)
    theirs = None if drafter is None else _bytes_per_second(drafter, columns, cost.drafter_step_seconds)
    return Bandwidth(ours, theirs, roofs.read, None if ours is None else ours / roofs.read, roofs.copy)


def _bytes_per_second(model: Model, columns: float, seconds: float | None) -> float | None:
    return (model.step_bytes + columns * model.column_bytes()) / seconds if seconds else None


def of_metrics(parts: Components, results: Sequence[Result]) -> tuple[dict[str, dict[str, float | None]], list[str]]:
    """The numbers of each of the run's metrics, by its name, and a note on each one that failed: an error in a metric
    must not lose a run that is decoded."""
    found: dict[str, dict[str, float | None]] = {}
    notes = []
    for name, metric in parts.metrics.items():
        try:
            found[name] = dict(metric.of_run([[r.numbers[name] for r in x.speculative.rounds] for x in results]))
        except Exception as error:
            found[name] = {}
            notes.append(f"metric {name} has no numbers: {type(error).__name__}: {error}")
    return found, notes


def memory(parts: Components, record: RunRecord) -> Memory:
    """Bytes that were in use at most, of weights, and of keys and values."""
    weights = parts.target.weight_bytes + sum(model.weight_bytes for model in parts.drafter.models)
    weights += parts.drafter.own_bytes + parts.target.executor.bytes()
    return Memory(peak_bytes(parts.target.device), weights, max(group.speculative.kv_bytes for group in record.groups))


def _times(requests: Sequence[DecodedRequest]) -> Times:
    return [request.seconds for request in requests], [len(request.tokens) for request in requests]


def _peer_times(results: Sequence[Result], name: str) -> Times:
    outputs = [result.peers[name] for result in results]
    return [output.decode_seconds for output in outputs], [output.decoded for output in outputs]


def _time_ratio(record: RunRecord, seconds_of: Callable[[DecodeResult], float]) -> float:
    """Seconds per token of plain decoding over those of speculative decoding."""
    ours, plain = ([(g.speculative, g.baseline)[way] for g in record.groups] for way in (0, 1))
    seconds = [sum(map(seconds_of, decoded)) for decoded in (ours, plain)]
    tokens = [sum(len(r.tokens) for d in decoded for r in d.requests) for decoded in (ours, plain)]
    return (seconds[1] / tokens[1]) / (seconds[0] / tokens[0])


def _calls(record: RunRecord) -> int:
    """Calls of the target in speculative decoding."""
    return sum(group.speculative.calls for group in record.groups)
