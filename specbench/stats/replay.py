"""Replay: what another gamma policy would have given on a finished run, without a model.

The acceptance of a guess does not depend on what was drafted before (`stats/position_stats.py`): its outcome is known
where the run tested it, and is drawn elsewhere. Each simulated round costs what a round with as many drafted tokens
took on the other half of the prompts, if there are enough for halves. Policies see q along the text's own tokens."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from specbench.decoding.gamma_policy import GammaPolicy
from specbench.errors import ConfigError
from specbench.policies.gamma.fixed import FixedGamma
from specbench.stats.bootstrap import speedup_interval, student
from specbench.stats.costs import extend
from specbench.stats.estimates import Cost, Floats, GammaPick, GammaSpeedup, HalfCosts, Interval, RoundCost
from specbench.stats.records import Result


@dataclass
class Text:
    """One prompt's speculated text: arrays [tokens], with an entry per generated token."""

    prompt: str
    prompt_tokens: int
    limit: int  # the largest number of new tokens
    baseline_seconds: float
    baseline_tokens: int
    outcome: Floats  # 1, 0, or not a number where no guess was tested
    beta: Floats  # not a number where the drafter has no guess
    acceptance: Floats  # of a guess, given the token that stands there; likewise
    root_entropy: Floats  # sqrt(H(q) / log V)
    confidence: Floats  # max q
    cluster: str = ""  # of texts that have something in common; each is its own if there is none
    half: int = 0  # of the prompts, if the trace has halves

    def __len__(self) -> int:
        return len(self.outcome)


@dataclass
class HalfOfPrompts:
    """What rounds of one half of the prompts cost."""

    seconds: Floats  # [largest + 1], a row's share of a round, by drafted tokens
    covariance: Floats  # of `seconds`, [largest + 1, largest + 1]

    @staticmethod
    def of(costs: HalfCosts, largest: int) -> "HalfOfPrompts":
        """From what results.json holds."""
        gammas = [cost.gamma for cost in costs.by_gamma]
        lines = np.array([extend(gammas, row, largest) for row in np.eye(len(gammas))])  # [G, largest + 1]
        return HalfOfPrompts(seconds_by_gamma(costs.by_gamma, largest), lines.T @ np.array(costs.covariance) @ lines)


@dataclass
class Trace:
    """What replay needs of a finished run. With `halves`, a text is charged what rounds of the other half cost."""

    texts: list[Text]
    seconds: Floats  # [largest + 1], a row's share of a round, by drafted tokens
    speedup: float  # as measured
    halves: Sequence[HalfOfPrompts] = ()  # two, or none

    @property
    def largest(self) -> int:
        """The largest gamma whose cost was measured."""
        return len(self.seconds) - 1

    def charged(self, rounds: Floats) -> Floats:
        """Seconds [texts] of rounds [texts, largest + 1]."""
        by_half = [half.seconds for half in reversed(self.halves)] or [self.seconds]
        found: Floats = (rounds * np.array([by_half[text.half] for text in self.texts])).sum(1)
        return found


class TracedCosts:
    """The costs of a trace, in place of a calibration pass. With a `half`, for policies that are judged on its texts
    with the other half's costs: then seconds are its own, and betas the other half's."""

    def __init__(self, trace: Trace, half: int | None = None):
        texts = [text for text in trace.texts if half is None or text.half != half]
        betas = np.concatenate([text.beta[np.isfinite(text.beta)] for text in texts])
        self.alpha, self.acceptance = float(betas.mean()), (float(betas.sum()), len(betas))
        self._seconds = trace.seconds if half is None else trace.halves[half].seconds

    def seconds(self, largest: int) -> Floats:
        """Seconds of a round with 0 .. largest drafted tokens, [largest + 1]."""
        return self._seconds[: largest + 1]


@dataclass(frozen=True)
class Replayed:
    """One policy on one trace: sums over all texts, means over the draws of unknown outcomes."""

    speedup: float
    ci95: Interval
    rounds: float
    drafted: float
    tokens: float

    @property
    def block_efficiency(self) -> float:
        return self.tokens / self.rounds


def trace_of(
    results: Sequence[Result], costs: Sequence[RoundCost], speedup: float, halves: Sequence[HalfCosts] = ()
) -> Trace:
    """The trace of what was just decoded: of the texts whose betas were read."""
    texts = []
    for result in results:
        if (laws := result.speculative_laws) is not None:
            texts.append(Text(
                prompt=result.request.id,
                prompt_tokens=result.request.prompt_tokens,
                limit=result.limit,
                baseline_seconds=result.baseline.seconds,
                baseline_tokens=len(result.baseline.tokens),
                outcome=np.array([np.nan if o is None else o for o in result.speculative.outcomes()], float),
                beta=laws.beta,
                acceptance=laws.acceptance,
                root_entropy=np.sqrt(laws.relative_entropy),
                confidence=laws.confidence,
                cluster=result.request.prompt_id,
            ))  # fmt: skip
    return traced(texts, costs, speedup, halves)


def traced(
    texts: Sequence[Text], costs: Sequence[RoundCost], speedup: float, halves: Sequence[HalfCosts] = ()
) -> Trace:
    """A trace of texts, which get cluster and half from `halves`. Raises KeyError if a text is in neither."""
    seconds = seconds_by_gamma(costs)
    of = {id: (ids[0], number) for number, half in enumerate(halves) for ids in half.clusters for id in ids}
    placed = [replace(t, cluster=of[t.prompt][0], half=of[t.prompt][1]) if of else t for t in texts]
    return Trace(placed, seconds, speedup, [HalfOfPrompts.of(half, len(seconds) - 1) for half in halves])


def seconds_by_gamma(costs: Sequence[RoundCost], largest: int | None = None) -> Floats:
    """Seconds of a row's share of a round, by drafted tokens, [largest + 1]; up to the largest in `costs` unless
    given."""
    gammas = [cost.gamma for cost in costs]
    return extend(gammas, [cost.share for cost in costs], max(gammas) if largest is None else largest)


def sweep(trace: Trace, draws: int = 3) -> dict[int, Replayed]:
    """Replays every constant gamma whose cost was measured."""
    return {g: priced(trace, rounds) for g, rounds in sweep_rounds(trace, draws).items()}


def sweep_rounds(trace: Trace, draws: int = 3) -> dict[int, Floats]:
    """The rounds [texts, largest + 1] of every constant gamma whose cost was measured: see `rounds_of`."""
    return {g: rounds_of(trace, FixedGamma(g), draws) for g in range(trace.largest + 1)}


def pick(trace: Trace, swept: Mapping[int, Floats]) -> tuple[list[int], Replayed]:
    """The best constant gamma of `sweep_rounds` on each half of the prompts, and what every text gives with the other
    half's choice; without halves the best on all texts, and what it gives."""
    seconds = {g: trace.charged(rounds) for g, rounds in swept.items()}
    if not trace.halves:
        best = min(seconds, key=lambda g: float(seconds[g].sum()))
        return [best], priced(trace, swept[best])
    own = np.array([text.half for text in trace.texts])
    first, second = (min(seconds, key=lambda g: float(seconds[g][own == half].sum())) for half in (0, 1))
    return [first, second], priced(trace, np.where((own == 0)[:, None], swept[second], swept[first]))


@dataclass(frozen=True)
class Swept:
    """What constant gammas would have given: the fields of `RunResult` of these names."""

    gamma_sweep: list[GammaSpeedup] = field(default_factory=list)
    gamma_pick: GammaPick | None = None
    regret: float | None = None  # of the chosen gamma: 0.05 is 5 %


def gamma_sweep(results: Sequence[Result], cost: Cost, measured: float, chosen: int | None) -> Swept:
    """What every constant gamma up to the largest measured one would have given, what the best of them gives, and the
    regret of the `chosen` one. `measured` is the run's speedup."""
    trace = trace_of(results, cost.by_gamma, measured, cost.halves)
    rounds = sweep_rounds(trace)
    found = {gamma: priced(trace, of_gamma) for gamma, of_gamma in rounds.items()}
    gammas, best = pick(trace, rounds)
    return Swept(
        [GammaSpeedup(gamma, each.speedup, each.ci95) for gamma, each in found.items()],
        GammaPick(gammas, best.speedup, best.ci95, in_sample=not trace.halves),
        best.speedup / found[chosen].speedup - 1 if chosen in found else None,
    )


def replay(trace: Trace, policy: GammaPolicy, draws: int = 20, seed: int = 0) -> Replayed:
    """Simulates `policy` on the whole trace, begun anew for each of `draws` completions of the unknown outcomes. Raises
    ConfigError if it may draft more tokens than rounds were measured with."""
    return priced(trace, rounds_of(trace, policy, draws, seed))


def rounds_of(trace: Trace, policy: GammaPolicy, draws: int, seed: int = 0) -> Floats:
    """How many rounds of each text draft 0 .. largest tokens, [texts, largest + 1]: means over the draws. If the trace
    has halves, a policy that chooses by cost is calibrated for each of them. Raises ConfigError like `replay`."""
    if policy.largest > trace.largest:
        raise ConfigError(f"the policy may draft {policy.largest} tokens, but rounds were measured to {trace.largest}")
    generator, found = np.random.default_rng(seed), np.zeros((len(trace.texts), trace.largest + 1))
    for half in (0, 1) * draws if trace.halves and policy.calibrated else (None,) * draws:
        fresh = copy.deepcopy(policy)  # what it learns in one pass must not help it in the next
        if half is not None:
            fresh.calibrate(TracedCosts(trace, half))
        for index, text in enumerate(trace.texts):
            outcomes = np.where(
                np.isnan(text.outcome), generator.random(len(text)) < np.nan_to_num(text.acceptance), text.outcome > 0
            )
            drafted = _walk(text, index, outcomes, fresh)
            if half in (None, text.half):
                found[index] += np.bincount(drafted, minlength=trace.largest + 1)
    return found / draws


def priced(trace: Trace, rounds: Floats) -> Replayed:
    """What these rounds [texts, largest + 1] cost, and yield. With halves the interval has the error of the costs too;
    there is none where these may be 0 (Fieller, 1954)."""
    seconds = trace.charged(rounds)
    clusters = [t.cluster or t.prompt for t in trace.texts]
    speedup, ci95 = speedup_interval(
        [t.baseline_seconds for t in trace.texts],
        [t.baseline_tokens for t in trace.texts],
        seconds.tolist(),
        [len(t) for t in trace.texts],
        clusters,
    )
    if ci95 is not None and trace.halves:
        own, variance = np.array([t.half for t in trace.texts]), 0.0
        for half, other in enumerate(reversed(trace.halves)):
            of_half = rounds[own == half].sum(0)
            variance += of_half @ other.covariance @ of_half
        error = student(len({*clusters}) - 2) * np.sqrt(variance) / seconds.sum()  # of the logarithm
        low, high = (float(speedup * np.exp(s * np.hypot(np.log(end / speedup), error)))
                     for s, end in zip((-1, 1), ci95, strict=True))  # fmt: skip
        ci95 = (low, high) if error < 1 else None
    drafted = rounds.sum(0) @ np.arange(trace.largest + 1)
    return Replayed(speedup, ci95, float(rounds.sum()), float(drafted), sum(map(len, trace.texts)))


@dataclass
class _Place:
    """The part of a state that a policy reads (`RowsSeen`): one row."""

    lengths: list[int]
    prompt_lengths: list[int]
    serials: dict[int, int]
    active: tuple[bool, ...] = (True,)
    batch_size: int = 1


def _walk(text: Text, serial: int, outcomes: Floats, policy: GammaPolicy) -> list[int]:
    """The tokens that each round of one text drafts; outcomes [tokens]."""
    position, drafted = 0, []
    place = _Place([text.prompt_tokens], [text.prompt_tokens], {0: serial})
    policy.foresee(outcomes.tolist(), text.beta)
    while position < len(text):
        place.lengths = [text.prompt_tokens + position]
        gamma = min(policy.next_gamma(place)[0], text.limit - position - 1)
        gamma = _ended_early(policy, place, text, position, gamma)
        accepted = 0
        while accepted < gamma and position + accepted < len(text) and outcomes[position + accepted]:
            accepted += 1
        kept = min(accepted + 1, len(text) - position)
        policy.observe([gamma], [kept])
        drafted.append(gamma)
        position += kept
    return drafted


def _ended_early(policy: GammaPolicy, place: _Place, text: Text, position: int, gamma: int) -> int:
    """gamma, cut where the drafter has no guess and where the policy stops the draft."""
    inside = np.isnan(text.acceptance[position : position + gamma])
    gamma = int(inside.argmax()) if inside.any() else gamma
    if policy.stop is None:
        return gamma
    signals: Floats = vars(text)[policy.traced_as]
    for count in range(1, gamma):
        at = min(position + count, len(text)) - 1
        if not policy.go_on(place, [count], [float(signals[at])])[0]:
            return count
    return gamma
