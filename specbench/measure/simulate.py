"""Replay: what another gamma policy would have given on a finished run, without a model.

Given that a token stands at a position, its guess was accepted there with a probability that does not depend on what
was drafted before (`measure/text_laws.py`). So the outcome of a guess is known where the run tested one, and is drawn
where it did not. A policy is then simulated on the stored text, and each of its rounds costs what a round with that
many drafted tokens was measured to cost.

A trace does not hold the drafter's q for guesses that come after a rejected one. Policies that look at q see instead
its values along the text's own tokens.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specbench.decoded import Result
from specbench.decoding.gamma_policy import GammaPolicy
from specbench.gamma_policies.fixed import FixedGamma
from specbench.measure.costs import extend
from specbench.measure.estimators import speedup_interval
from specbench.results import Interval, RoundCost
from specbench.settings import ConfigError

Floats = npt.NDArray[np.float64]


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

    def __len__(self) -> int:
        return len(self.outcome)


@dataclass
class Trace:
    """What replay needs of a finished run."""

    texts: list[Text]
    seconds: Floats  # [largest + 1], a row's share of a round, by drafted tokens
    speedup: float  # as measured

    @property
    def largest(self) -> int:
        """The largest gamma whose cost was measured."""
        return len(self.seconds) - 1


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


def trace_of(results: Sequence[Result], costs: Sequence[RoundCost], speedup: float) -> Trace:
    """The trace of what was just decoded."""
    return Trace([text for text in map(_text, results) if text is not None], seconds_by_gamma(costs), speedup)


def _text(result: Result) -> Text | None:
    """A request's text; None if its betas were not read."""
    laws = result.speculative_laws
    if laws is None:
        return None
    return Text(
        prompt=result.request.id,
        prompt_tokens=len(result.request.tokens),
        limit=result.limit,
        baseline_seconds=result.baseline.seconds,
        baseline_tokens=len(result.baseline.tokens),
        outcome=np.array([np.nan if o is None else o for o in result.speculative.outcomes()], float),
        beta=laws.beta,
        acceptance=laws.acceptance,
        root_entropy=np.sqrt(laws.relative_entropy),
        confidence=laws.confidence,
        cluster=result.request.prompt_id,
    )


def seconds_by_gamma(costs: Sequence[RoundCost]) -> Floats:
    """Seconds of a row's share of a round, by drafted tokens, [largest + 1]."""
    gammas = [cost.gamma for cost in costs]
    return extend(gammas, [cost.share for cost in costs], max(gammas))


def sweep(trace: Trace, draws: int = 3) -> dict[int, Replayed]:
    """Replays every constant gamma whose cost was measured."""
    return {g: replay(trace, FixedGamma(g), draws) for g in range(trace.largest + 1)}


def replay(trace: Trace, policy: GammaPolicy, draws: int = 20, seed: int = 0) -> Replayed:
    """Simulates `policy` on the whole trace, begun anew for each of `draws` completions of the unknown outcomes. Raises
    ConfigError if it may draft more tokens than rounds were measured with."""
    if policy.largest > trace.largest:
        raise ConfigError(f"the policy may draft {policy.largest} tokens, but rounds were measured to {trace.largest}")
    generator, totals = np.random.default_rng(seed), np.zeros((len(trace.texts), 3))
    for _ in range(draws):
        fresh = copy.deepcopy(policy)  # what it learns in one pass must not help it in the next
        for index, text in enumerate(trace.texts):
            outcomes = np.where(
                np.isnan(text.outcome), generator.random(len(text)) < np.nan_to_num(text.acceptance), text.outcome > 0
            )
            totals[index] += _walk(trace, text, index, outcomes, fresh)
    totals /= draws
    speedup, ci95 = speedup_interval(
        [t.baseline_seconds for t in trace.texts],
        [t.baseline_tokens for t in trace.texts],
        totals[:, 2].tolist(),
        [len(t) for t in trace.texts],
        [t.cluster or t.prompt for t in trace.texts],
    )
    return Replayed(speedup, ci95, totals[:, 0].sum(), totals[:, 1].sum(), sum(map(len, trace.texts)))


@dataclass
class _Place:
    """The part of a state that a policy reads (`RowsSeen`): one row."""

    lengths: list[int]
    prompt_lengths: list[int]
    serials: dict[int, int]
    active: tuple[bool, ...] = (True,)
    batch_size: int = 1


def _walk(trace: Trace, text: Text, serial: int, outcomes: Floats, policy: GammaPolicy) -> tuple[int, int, float]:
    """The number of rounds, of drafted tokens, and the seconds of one text; outcomes [tokens]."""
    position, rounds, drafted, seconds = 0, 0, 0, 0.0
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
        rounds, drafted, seconds = rounds + 1, drafted + gamma, seconds + trace.seconds[gamma]
        position += kept
    return rounds, drafted, seconds


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
