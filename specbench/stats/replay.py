"""Replay: what another gamma policy would have given on a finished run, without a model.

The acceptance of a guess does not depend on what was drafted before (`stats/position_stats.py`): its outcome is known
where the run tested it, and is drawn elsewhere. Each simulated round costs what a round with as many drafted tokens
took on the other half of the prompts, if there are enough for halves. Policies see q along the text's own tokens."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, cast

import numpy as np

from specbench.errors import ConfigError
from specbench.policies.base import GammaPolicy
from specbench.policies.entropy import root_entropy
from specbench.policies.fixed import FixedGamma
from specbench.stats.bootstrap import speedup_interval, student
from specbench.stats.costs import FEWEST_ROUNDS, extend, fitted
from specbench.stats.estimates import Floats, HalfCosts, Interval, RoundCost
from specbench.stats.records import Result

DRAWS = 5  # of unknown outcomes; all policies meet the same ones, so that none is above the oracle


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
    prompts: Floats  # clusters that the rounds are of, [largest + 1]

    @staticmethod
    def of(costs: HalfCosts, largest: int) -> "HalfOfPrompts":
        """From what results.json holds."""
        gammas, shares = fitted(costs.by_gamma)
        known = [place for place, cost in enumerate(costs.by_gamma) if cost.gamma in gammas]
        covariance = np.array(costs.covariance)[np.ix_(known, known)]
        prompts = np.array(costs.prompts or [len(costs.clusters)] * len(costs.by_gamma), float)[known]
        lines = np.array([extend(gammas, row, largest) for row in np.eye(len(gammas))])  # [G, largest + 1]
        wanted = np.arange(largest + 1)
        return HalfOfPrompts(
            extend(gammas, shares, largest), lines.T @ covariance @ lines, np.interp(wanted, gammas, prompts)
        )

    def error(self, rounds: Floats) -> tuple[float, float]:
        """The variance of the seconds of these rounds [largest + 1], and its degrees of freedom (Satterthwaite)."""
        single = rounds**2 * self.covariance.diagonal()
        below = (single**2 / np.maximum(self.prompts - 1, 0.5)).sum()
        return float(rounds @ self.covariance @ rounds), float(single.sum() ** 2 / below) if below else np.inf


@dataclass
class Trace:
    """What replay needs of a finished run. With `halves`, a text is charged what rounds of the other half cost, at the
    pace of its own plain decoding."""

    texts: list[Text]
    seconds: Floats  # [largest + 1], a row's share of a round, by drafted tokens
    speedup: float  # as measured
    halves: Sequence[HalfOfPrompts] = ()  # two, or none
    greedy: bool = False  # whether guesses are the likeliest tokens, so that max q is their q(x)

    @property
    def largest(self) -> int:
        """The largest gamma whose cost was measured."""
        return len(self.seconds) - 1

    def charged(self, rounds: Floats) -> Floats:
        """Seconds [texts] of rounds [texts, largest + 1]."""
        found: Floats = self.paced(rounds * np.array([self.seconds_for(text) for text in self.texts])).sum(1)
        return found

    def paced(self, seconds: Floats) -> Floats:
        """Seconds [texts, any] of rounds of the mean pace, at the pace of each text's plain decoding."""
        if not self.halves:
            return seconds
        plain, tokens = np.array([[t.baseline_seconds, t.baseline_tokens] for t in self.texts]).T
        found: Floats = seconds * (plain / tokens * tokens.sum() / plain.sum())[:, None]
        return found

    def seconds_for(self, text: Text) -> Floats:
        """What a text is charged for a round, by drafted tokens, [largest + 1]."""
        return self.halves[1 - text.half].seconds if self.halves else self.seconds


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
    """A trace of texts, which get cluster and half from `halves`, up to the largest gamma that all of `costs` and
    `halves` have enough rounds of. Raises KeyError if a text is in no half, ConfigError if nothing has enough rounds.
    """
    known = [fitted(each)[0] for each in (costs, *(half.by_gamma for half in halves))]
    if not all(known):
        raise ConfigError(f"no gamma has {FEWEST_ROUNDS} rounds whose time is known")
    gammas, shares = fitted(costs)
    seconds = extend(gammas, shares, min(map(max, known)))
    of = {id: (ids[0], number) for number, half in enumerate(halves) for ids in half.clusters for id in ids}
    placed = [replace(t, cluster=of[t.prompt][0], half=of[t.prompt][1]) if of else t for t in texts]
    return Trace(placed, seconds, speedup, [HalfOfPrompts.of(half, len(seconds) - 1) for half in halves])


def sweep(trace: Trace, draws: int = DRAWS) -> dict[int, Replayed]:
    """Replays every constant gamma whose cost was measured."""
    return {g: priced(trace, rounds) for g, rounds in sweep_rounds(trace, draws).items()}


def sweep_rounds(trace: Trace, draws: int = DRAWS) -> dict[int, Floats]:
    """The rounds [texts, largest + 1] of every constant gamma whose cost was measured: see `rounds_of`."""
    return {g: rounds_of(trace, FixedGamma(g), draws) for g in range(trace.largest + 1)}


def pick(trace: Trace, swept: Mapping[int, Floats]) -> tuple[list[int], Replayed]:
    """The gammas of `pick_rounds`, and what they give."""
    gammas, rounds = pick_rounds(trace, swept)
    return gammas, priced(trace, rounds)


def pick_rounds(trace: Trace, swept: Mapping[int, Floats]) -> tuple[list[int], Floats]:
    """The best constant gamma of `sweep_rounds` on each half of the prompts, and the rounds of every text with the
    other half's choice; without halves the best on all texts, and its rounds."""
    seconds = {g: trace.charged(rounds) for g, rounds in swept.items()}
    if not trace.halves:
        best = min(seconds, key=lambda g: float(seconds[g].sum()))
        return [best], swept[best]
    own = np.array([text.half for text in trace.texts])
    first, second = (min(seconds, key=lambda g: float(seconds[g][own == half].sum())) for half in (0, 1))
    return [first, second], np.where((own == 0)[:, None], swept[second], swept[first])


def replay(trace: Trace, policy: GammaPolicy, draws: int = DRAWS, seed: int = 0) -> Replayed:
    """Simulates `policy` on the whole trace, begun anew for each of `draws` completions of the unknown outcomes. Raises
    ConfigError if it may draft more tokens than rounds were measured with."""
    return priced(trace, rounds_of(trace, policy, draws, seed))


def rounds_of(trace: Trace, policy: GammaPolicy, draws: int, seed: int = 0) -> Floats:
    """How many rounds of each text draft 0 .. largest tokens, [texts, largest + 1]: means over the draws. If the trace
    has halves, a policy that chooses by cost is calibrated for each of them. Raises ConfigError like `replay`."""
    if policy.largest > trace.largest:
        raise ConfigError(f"the policy may draft {policy.largest} tokens, but rounds were measured to {trace.largest}")
    found = np.zeros((len(trace.texts), trace.largest + 1))
    by_half = (0, 1) if trace.halves and policy.calibrated else (None,)
    for draw, half in product(range(draws), by_half):
        generator = np.random.default_rng((seed, draw))  # all policies meet the same outcomes
        fresh = copy.deepcopy(policy)  # what it learns in one pass must not help it in the next
        if half is not None:
            fresh.calibrate(TracedCosts(trace, half))
        for index, text in enumerate(trace.texts):
            outcomes = np.where(
                np.isnan(text.outcome), generator.random(len(text)) < np.nan_to_num(text.acceptance), text.outcome > 0
            )
            drafted = _walk(text, index, outcomes, fresh, trace.seconds_for(text))
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
        own = np.array([t.half for t in trace.texts])
        paced = trace.paced(rounds)
        found = [other.error(paced[own == half].sum(0)) for half, other in enumerate(reversed(trace.halves))]
        variance = sum(each for each, _ in found)
        below = sum(each**2 / freedom for each, freedom in found)
        freedom = min(variance**2 / below if below else np.inf, len({*clusters}) - 2)
        error = student(freedom) * np.sqrt(variance) / seconds.sum()  # of the logarithm
        low, high = (float(speedup * np.exp(s * np.hypot(np.log(end / speedup), error)))
                     for s, end in zip((-1, 1), ci95, strict=True))  # fmt: skip
        ci95 = (low, high) if error < 1 else None
    drafted = rounds.sum(0) @ np.arange(trace.largest + 1)
    return Replayed(speedup, ci95, float(rounds.sum()), float(drafted), sum(map(len, trace.texts)))


@dataclass
class ReplayedRows:
    """The part of a state that policies read : one row, unless there are more."""

    lengths: list[int]
    sequences: list[Any]
    active: Sequence[bool] = (True,)
    batch_size: int = 1


def _walk(text: Text, serial: int, outcomes: Floats, policy: GammaPolicy, seconds: Floats) -> list[int]:
    """The tokens that each round of one text drafts; outcomes [tokens], seconds of a round [largest + 1]."""
    position, drafted = 0, []
    place = ReplayedRows([text.prompt_tokens], [object()])
    while position < len(text):
        place.lengths = [text.prompt_tokens + position]
        gamma = min(policy.next_gamma(cast(Any, place))[0], text.limit - position - 1)
        drawn = gamma = _ended_early(policy, place, text, position, gamma)
        accepted = 0
        while accepted < gamma and position + accepted < len(text) and outcomes[position + accepted]:
            accepted += 1
        kept = min(accepted + 1, len(text) - position)
        policy.observe([gamma], [kept])
        drafted.append(drawn)
        position += kept
    return drafted


def _ended_early(policy: GammaPolicy, place: ReplayedRows, text: Text, position: int, gamma: int) -> int:
    """gamma, cut where the drafter has no guess and where the policy stops the draft."""
    inside = np.isnan(text.acceptance[position : position + gamma])
    gamma = int(inside.argmax()) if inside.any() else gamma
    if policy.stop is None:
        return gamma
    signals: Floats = vars(text)["root_entropy" if policy.signal is root_entropy else "confidence"]
    for count in range(1, gamma):
        at = min(position + count, len(text)) - 1
        if not policy.go_on(cast(Any, place), [count], [float(signals[at])])[0]:
            return count
    return gamma
