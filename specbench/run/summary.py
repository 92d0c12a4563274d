"""From decoded requests to a RunResult: what their sums give, and what needs texts, rounds, models or the machine."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from specbench import theory
from specbench.config.components import Components
from specbench.config.memory import peak_bytes
from specbench.decoding.model import Model
from specbench.errors import causes
from specbench.results.schema import Memory, RunResult
from specbench.run.decoder import Session
from specbench.stats.bootstrap import FEWEST, group_clusters
from specbench.stats.costs import half_costs
from specbench.stats.derive import RunFacts, derive, of_one_process
from specbench.stats.estimates import Cost, Derived, Machine
from specbench.stats.experts import woken_experts
from specbench.stats.gamma_sweep import Swept, gamma_sweep
from specbench.stats.latency import WaitLimits, by_rate, latency
from specbench.stats.lenience_drift import drift
from specbench.stats.losslessness import judge
from specbench.stats.machine_noise import Roofs
from specbench.stats.records import Group, PerRequestSums, Result, RunRecord
from specbench.stats.request_sums import Tokens, request_sums


class Watch(Protocol):
    """What was measured of the machine, or the machines, of a run: `Probes`, or those of workers."""

    @property
    def roofs(self) -> Roofs: ...

    def judge(self, groups: Sequence[Group]) -> Machine: ...


def run_result(session: Session, record: RunRecord, status: str, provenance: dict[str, Any], watch: Watch) -> RunResult:
    """All estimates of a run. Raises RuntimeError if every prompt failed."""
    parts, results, gamma = session.parts, record.results, session.parts.policy.constant
    if not results:
        raise RuntimeError(f"every prompt failed, the first with {record.failures[0].error}")
    record.sums, roofs, by_beta = sums_of_run(parts, record), watch.roofs, parts.verifier.accepts_with_beta
    failed = sum(len(failure.requests) for failure in record.failures)
    facts = RunFacts(gamma, by_beta, roofs.read, failed, record.too_long)
    found = derive(lambda: [record.sums], of_one_process, facts)
    no_replay = why_no_replay(parts, results)
    cost = full_cost(session, record, found.cost, no_replay)
    machine, speedup = watch.judge(record.groups), found.speedup.measured
    swept = Swept(no_replay=no_replay) if no_replay else gamma_sweep(results, cost, speedup, gamma, machine.reasons)
    c_hat = parts.drafter.operations_per_token / parts.target.operations_per_token
    metrics, notes = of_metrics(parts, results)
    measured = vars(found) | {
        "cost": cost,
        "bandwidth": replace(found.bandwidth, copy_bytes_per_second=roofs.copy),
        "drift": drift(results, **found.drift),
    }
    return RunResult(
        name=parts.name,
        status=status,
        config=parts.config,
        choices=parts.choices,
        executor=parts.target.executor.facts(),
        provenance=provenance,
        **measured,
        operations_factor=chain_operations(parts, found, c_hat),
        acceptance_law=parts.acceptance_law,
        c_hat=c_hat,
        gamma=gamma,
        **vars(swept),
        lossless=parts.decoding.judge(record) or judge(record, parts.verifier.lossless, parts.target.sampling.greedy),
        latency=latency(record.groups, parts.batch_size),
        latency_by_rate=by_rate(record.groups, parts.batch_size, WaitLimits()),
        memory=memory(parts, record),
        machine=machine,
        metrics=metrics,
        experts=woken_experts(parts.target, record.groups),
        beam=parts.decoding.numbers(results, parts.policy.largest, c_hat),
        notes=[
            *parts.notes,
            *record.notes,
            *parts.target.executor.notes(),
            *in_sample(swept),
            *notes,
            *(note for name in parts.peers for note in unanswered(name, results, found)),
        ],
    )


def unanswered(name: str, results: Sequence[Result], found: Derived) -> Iterator[str]:
    """What a peer has not done, in words."""
    errors = [result.peers[name] for result in results if name not in result.outputs]
    if errors:
        yield f"{name} failed for {len(errors)} of {len(results)} requests, the first time with {causes(errors[0])}"
    if len(errors) < len(results) and name not in found.speedup_over:
        yield (f"{name} has no time per token: every text of it came as one piece or a few, as behind a proxy that "
               "keeps a stream until its end, or has one token")  # fmt: skip


def sums_of_run(parts: Components, record: RunRecord) -> PerRequestSums:
    """The sums over each request, for sums.parquet."""

    def bytes_of(model: Model, calls: float, columns: float) -> float:
        """Bytes that so many one-token calls read, whose rows have so many columns in all."""
        return calls * model.step_bytes + columns * model.column_bytes()

    target, *drafters = (partial(bytes_of, model) for model in (parts.target, *parts.drafter.models))
    drafter = drafters[0] if len(drafters) == 1 else None
    tokens = Tokens(parts.target.tokenizer, parts.target.vocab_size)
    return request_sums(record, parts.batch_size, parts.verifier.accepts_with_beta, target, drafter, tokens)


def chain_operations(parts: Components, found: Derived, c_hat: float) -> float | None:
    """Theorem 3.11, which counts a chain's operations; None of trees and searches, or if nothing was drafted."""
    alpha, counts = found.alpha.mean, found.counts
    if alpha is None or found.cost.c is None or parts.drafter.trees or not parts.decoding.samples:
        return None
    gamma = counts.drafted / counts.rounds if parts.policy.constant is None else parts.policy.constant
    return theory.operations_factor(alpha, gamma, c_hat)


def full_cost(session: Session, record: RunRecord, cost: Cost, no_replay: str) -> Cost:
    """The cost, with what is known of single rounds, and of laps that sums do not have."""
    return replace(
        cost,
        by_gamma=session.costs.summary(),
        halves=[] if no_replay else half_costs(session.costs, record.results, group_clusters(record)),
        read_again=None,
    )


def in_sample(swept: Swept) -> list[str]:
    """A note, if replay chose among gammas and had too few prompts for halves."""
    if swept.gamma_pick is None or not swept.gamma_pick.in_sample or len(swept.gamma_sweep) < 2:
        return []
    return [f"the best gamma by replay was chosen on the prompts it is judged on (in-sample), so it looks better than "
            f"it is: half of the prompts (or groups of rows) are fewer than {FEWEST}"]  # fmt: skip


def why_no_replay(parts: Components, results: Sequence[Result]) -> str:
    """Why the text tells nothing of another gamma; empty if it does."""
    if not any(result.speculative_laws is not None for result in results):
        return "there are no betas along its text"
    if parts.workload.over_time:
        return "requests arrive over time, and probes serve all rows"
    if parts.drafter.fixed_in_round:
        return "its drafter's later guesses depend on where a round began"
    if any(r.lenience < 1 for result in results for r in result.speculative.rounds):
        return "with lenience below 1 the text's distribution depends on which of its tokens were tested"
    return ""


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
