"""Replay of gamma policies on a batch: many texts at once, whose rounds cost what a linear function says."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import NamedTuple

import numpy as np

from specbench.decoding.gamma_policy import GammaPolicy, RowsSeen
from specbench.stats.estimates import Floats, Integers
from specbench.stats.replay import ReplayedRows, Text

PASSES = 4  # of an oracle, each with the tokens per second of the one before


class RoundSeconds(NamedTuple):
    """Seconds of a round: fixed, of a drafter step, of a token that the target reads, of a token of context."""

    start: float
    step: float
    token: float
    context: float

    def of(self, steps: int, tokens: int, context: int) -> float:
        return self.start + self.step * steps + self.token * tokens + self.context * context


@dataclass
class Traced:
    """A text: at each place how many guesses drafted from there are accepted, and the confidence in the guess there."""

    lengths: Integers
    confidence: Floats
    beta: Floats | None = None  # expected acceptance, if it is known
    greedy: bool = False  # as of `stats.replay.Trace`


@dataclass
class BatchLoad:
    """What a policy is tried on: `rows` texts at a time from `texts`, in turn, each after `context` tokens. `by_row`
    says that the target reads a row's guesses alone, and not the columns of the longest draft."""

    texts: Sequence[Traced]
    cost: RoundSeconds
    rows: int
    context: int
    by_row: bool = False

    def seconds(self, steps: int, counts: Sequence[int], context: int) -> float:
        tokens = sum(counts) + self.rows if self.by_row else self.rows * (max(counts) + 1)
        return self.cost.of(steps, tokens, context)

    @property
    def alpha(self) -> float:
        """Accepted over tested guesses along all texts."""
        accepted = np.concatenate([text.lengths[:-1] > 0 for text in self.texts])
        return float(accepted.mean()) if len(accepted) else 0.0


class LoadCosts:
    """The costs of a load, in place of a calibration pass."""

    def __init__(self, load: BatchLoad):
        self.load, self.alpha, self.acceptance = load, load.alpha, (load.alpha * 1000, 1000)

    def seconds(self, largest: int) -> Floats:
        load = self.load
        return np.array([load.seconds(g, [g] * load.rows, load.rows * load.context) for g in range(largest + 1)])


@dataclass
class SimulatedRows(ReplayedRows):
    """Also each row's text and place in it."""

    texts: list[Traced] = field(default_factory=list)
    at: list[int] = field(default_factory=list)


class Foreseeing(GammaPolicy):
    """An oracle: what every row would keep is known, or with `betas` expected, and one gamma for the batch maximises
    tokens - rate x seconds. The rate is the tokens per second that this has given before."""

    def __init__(self, load: BatchLoad, largest: int, betas: bool = False):
        self.load, self.largest, self.betas, self.rate = load, largest, betas, 0.0
        self.widths = tuple(range(1, largest + 1))

    def next_gamma(self, state: RowsSeen) -> list[int]:
        assert isinstance(state, SimulatedRows)
        gammas = np.arange(1, self.largest + 1)
        kept = np.zeros(self.largest)
        for text, at in zip(state.texts, state.at, strict=True):
            if self.betas and text.beta is not None:
                ahead = np.nan_to_num(text.beta[at : at + self.largest])
                kept[: len(ahead)] += np.cumprod(ahead)
            else:
                kept += gammas <= text.lengths[at]
        load, rows = self.load, state.batch_size
        price = load.cost.step + load.cost.token * rows
        worth = np.r_[0.0, kept.cumsum() - self.rate * price * gammas]
        return [int(worth.argmax())] * rows


@dataclass(frozen=True)
class SimulatedRate:
    """What a policy gave on a load."""

    tokens: int
    seconds: float
    rounds: int
    drafted: int

    @property
    def per_second(self) -> float:
        return self.tokens / self.seconds


def simulate(load: BatchLoad, policy: GammaPolicy, each: int) -> SimulatedRate:
    """Decodes so many tokens for each row, all rows together; a row whose text has ended takes the next one."""
    rows, clock = load.rows, [0.0]
    coming = cycle(load.texts)
    begin = [load.context] * rows
    place = SimulatedRows([*begin], begin, dict(enumerate(range(rows))), [True] * rows, rows,
                          [next(coming) for _ in range(rows)], [0] * rows)  # fmt: skip
    for row, text in enumerate(place.texts):  # rows do not begin together
        place.at[row] = (row * 7919) % len(text.lengths)
    policy.now = lambda: clock[0]
    if policy.calibrated:
        policy.calibrate(LoadCosts(load))
    tokens = drafted = rounds = 0
    while tokens < each * rows:
        place.lengths = [load.context + at for at in place.at]
        gamma = [min(g, len(text.lengths) - at - 1) for g, text, at in
                 zip(policy.next_gamma(place), place.texts, place.at, strict=True)]  # fmt: skip
        counts = drawn = _ended_early(policy, place, gamma)
        if policy.trims:
            counts = [min(pair) for pair in zip(counts, policy.admit(place), strict=True)]
        kept = [min(g, int(t.lengths[at])) + 1 for g, t, at in zip(counts, place.texts, place.at, strict=True)]
        clock[0] += load.seconds(max(drawn), counts, sum(place.lengths))
        policy.observe(counts, kept)
        tokens, drafted, rounds = tokens + sum(kept), drafted + sum(counts), rounds + 1
        for row, new in enumerate(kept):
            place.at[row] += new
            if place.at[row] >= len(place.texts[row].lengths):
                place.texts[row], place.at[row] = next(coming), 0
                place.serials[row] = max(place.serials.values()) + 1
    return SimulatedRate(tokens, clock[0], rounds, drafted)


def _ended_early(policy: GammaPolicy, place: SimulatedRows, gamma: list[int]) -> list[int]:
    """Guesses of each row, with a policy that may end its draft after each."""
    if policy.stop is None:
        return gamma
    count, going = [0] * len(gamma), [g > 0 for g in gamma]
    while any(going):
        depth = max(count)
        signals = [float(t.confidence[min(at + depth, len(t.lengths) - 1)]) for t, at in
                   zip(place.texts, place.at, strict=True)]  # fmt: skip
        count = [n + on for n, on in zip(count, going, strict=True)]
        more = policy.go_on(place, count, signals)
        going = [on and m and n < g for on, m, n, g in zip(going, more, count, gamma, strict=True)]
    return count


def foreseen(load: BatchLoad, largest: int, each: int, betas: bool = False) -> SimulatedRate:
    """What an oracle gives."""
    policy = Foreseeing(load, largest, betas)
    found = simulate(load, policy, each)
    for _ in range(PASSES):
        policy.rate = found.per_second
        found = max(found, simulate(load, policy, each), key=lambda rate: rate.per_second)
    return found


def traced_texts(texts: Sequence[Text], greedy: bool = False, seed: int = 0) -> list[Traced]:
    """The texts of a finished run; the outcome of a guess that it did not test is drawn."""
    generator, found = np.random.default_rng(seed), []
    for text in texts:
        drawn = generator.random(len(text)) < np.nan_to_num(text.acceptance)
        outcomes = np.where(np.isnan(text.outcome), drawn, text.outcome > 0)
        found.append(Traced(runs_of(outcomes), np.nan_to_num(text.confidence), text.beta, greedy))
    return found


def runs_of(outcomes: Floats) -> Integers:
    """How many guesses in a row are accepted from each place on, from whether each one is."""
    lengths = np.zeros(len(outcomes), int)
    run = 0
    for place in reversed(range(len(outcomes))):
        run = run + 1 if outcomes[place] else 0
        lengths[place] = run
    return lengths
