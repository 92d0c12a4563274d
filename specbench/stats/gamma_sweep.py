"""What a run says of other constant gammas, by replay, and when it says nothing."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from specbench.errors import ConfigError
from specbench.stats.bootstrap import by_cluster, student
from specbench.stats.estimates import Cost, CostCheck, Factor, Floats, GammaPick, GammaSpeedup
from specbench.stats.records import Result
from specbench.stats.replay import Trace, pick_rounds, priced, sweep_rounds, trace_of

WIDEST = 1.25  # of the interval of the check of costs: the upper end over the lower one
CLOSE = 0.05  # to 1, of the check where there is no interval


@dataclass(frozen=True)
class Swept:
    """What constant gammas would have given: the fields of `RunResult` of these names."""

    gamma_sweep: list[GammaSpeedup] = field(default_factory=list)
    gamma_pick: GammaPick | None = None
    regret: float | None = None  # of the chosen gamma: 0.05 is 5 %
    cost_check: CostCheck | None = None
    no_replay: str = ""


def gamma_sweep(
    results: Sequence[Result], cost: Cost, measured: float, chosen: int | None, unsteady: Sequence[str] = ()
) -> Swept:
    """What every constant gamma up to the largest measured one would have given, what the best of them gives, and the
    regret of the `chosen` one; nothing if the machine was not steady, for these reasons, or if the run's own rounds did
    not take what replay charges for them. `measured` is the run's speedup."""
    try:
        trace = trace_of(results, cost.by_gamma, measured, cost.halves)
    except ConfigError as error:
        return Swept(no_replay=str(error))
    rounds = sweep_rounds(trace)
    found = {gamma: priced(trace, of_gamma) for gamma, of_gamma in rounds.items()}
    check = checked_costs(trace, *own_rounds(results, trace.largest))
    if reason := not_steady(unsteady) or why_failed(check):
        return Swept(cost_check=check, no_replay=reason)
    gammas, of_pick = pick_rounds(trace, rounds)
    best, own = priced(trace, of_pick), rounds.get(-1 if chosen is None else chosen)
    over = None if own is None or not trace.halves else over_own(trace, of_pick, own)
    return Swept(
        [GammaSpeedup(gamma, each.speedup, each.ci95) for gamma, each in found.items()],
        GammaPick(gammas, best.speedup, best.ci95, in_sample=not trace.halves, over_own=over),
        best.speedup / found[chosen].speedup - 1 if chosen in found else None,
        check,
    )


def not_steady(reasons: Sequence[str]) -> str:
    """Why nothing is expected of other gammas on a machine that was not steady; empty without reasons."""
    return f"the machine was not steady: {reasons[0]}" if reasons else ""


def own_rounds(results: Sequence[Result], largest: int) -> tuple[Floats, Floats]:
    """Of the texts of a trace: the seconds [texts] that they took in the run, and how many of their rounds drafted 0 ..
    largest tokens, [texts, largest + 1]. Longer drafts count as the largest."""
    own = [result.speculative for result in results if result.speculative_laws is not None]
    drafted = [np.minimum([r.steps for r in each.rounds], largest) for each in own]
    rounds = [np.bincount(each, minlength=largest + 1).astype(float) for each in drafted]
    return np.array([each.seconds for each in own]), np.array(rounds)


def checked_costs(trace: Trace, seconds: Floats, rounds: Floats) -> CostCheck:
    """Whether rounds [texts, largest + 1] take, by what replay charges for them, the seconds [texts] that they took in
    the run. Without halves the interval lacks the error of the costs, so it is not given, and the factor must be close
    to 1."""
    found = _factor(trace, trace.charged(rounds), seconds, trace.paced(rounds) / trace.charged(rounds).sum())
    if not trace.halves:
        return CostCheck(found.factor, None, abs(found.factor - 1) <= CLOSE)
    low, high = found.ci95 or (0.0, np.inf)
    return CostCheck(found.factor, found.ci95, low <= 1 <= high <= WIDEST * low)


def why_failed(check: CostCheck) -> str:
    """Why nothing is expected of other gammas; empty if the check passed."""
    told, ci95 = f"by its costs this run's rounds take {check.factor:.2f}x the time that they took", check.ci95
    if check.passed:
        return ""
    if ci95 is None:
        return f"{told}, without an interval"
    return f"{told} ({ci95[0]:.2f} to {ci95[1]:.2f})" + ", which is too wide" * (ci95[0] <= 1 <= ci95[1])


def over_own(trace: Trace, pick: Floats, own: Floats, chosen: bool = True) -> Factor:
    """How much faster the texts are with the rounds of the pick than with those of the run's own gamma, both [texts,
    largest + 1] and at the same costs. If it was `chosen` on this trace, each half is judged on what the other one
    chose by, so the errors of the two are not independent: they are added, not their squares."""
    before, after = (trace.charged(rounds) for rounds in (own, pick))
    return _factor(trace, before, after, trace.paced(own) / before.sum() - trace.paced(pick) / after.sum(), chosen)


def _factor(trace: Trace, above: Floats, below: Floats, by_round: Floats, chosen: bool = False) -> Factor:
    """The ratio of the sums of two seconds [texts], with the error of the texts and that of the costs. by_round [texts,
    largest + 1] is how its logarithm changes with a second that rounds take longer. `chosen` is as for `over_own`."""
    totals = float(above.sum()), float(below.sum())
    by_text = above / totals[0] - below / totals[1]  # how the logarithm changes with a text
    halves, errors = np.array([text.half for text in trace.texts]), [0.0]
    for half, costs in enumerate(reversed(trace.halves)):
        here = np.flatnonzero(halves == half).tolist()
        clusters: list[Hashable] = [trace.texts[place].cluster or trace.texts[place].prompt for place in here]
        sums = by_cluster(by_text[here][None], clusters)[0]
        of_texts, count = len(sums) * float(sums.var(ddof=1)), len(sums)
        of_costs, freedom = costs.error(by_round[here].sum(0))
        if variance := of_texts + of_costs:
            freedom = variance**2 / (of_texts**2 / (count - 1) + of_costs**2 / freedom)
            errors.append(student(freedom) * variance**0.5)
    factor, error = totals[0] / totals[1], sum(errors) if chosen else float(np.hypot.reduce(errors))
    return Factor(factor, (float(factor * np.exp(-error)), float(factor * np.exp(error))) if error < 1 else None)
