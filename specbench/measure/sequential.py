"""The test of losslessness above temperature 0: what was drawn, under the distribution that it should have and others.

Each draw of a run has a distribution that is known before it: a guess is drawn from q; it is accepted with probability
min(1, p / q); a recovered token is drawn from norm(max(0, p - q)); a bonus token, or that of a plain step, from p. An
alternative says what a fault would make of one kind of draw. The product over draws of alternative / distribution is a
martingale with mean 1 in an exact run, and so is the mean of such products with fixed weights: it exceeds 1 / a with
probability a at most (Ville 1939), for runs of any size.

n positions of a text, k draws of a kind, V vocabulary, K alternatives.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specbench.measure.intervals import Floats

LEVEL = 1 / 200  # the probability that an exact run fails is at most this
FOUND = 1.28  # standard deviations: a fault beyond the limit by this much is found in nine of ten runs
SMALLEST = math.exp(-10)  # probabilities below it are tilted as this one is
HEAD = 4096  # tokens of a vocabulary that are told apart; all others count as one
LEFT = 0.02  # of the distribution stays in every alternative: no single draw decides against one
MARGIN = 1.05  # q / p above which the drafter favours a token
SURE = 1 + 1e-6  # p / q from which a guess is accepted whatever rounding does
SUMS = ("log", "mean", "variance", "tv", "draws")  # of each alternative; `mean` and `variance` are those under it
Change = Callable[..., Tensor]


@dataclass(frozen=True)
class Alternative:
    """What a fault would make of the draws of a `kind`. `change` gives weights [k, V] of tokens from their distribution
    [k, V] and what else the fault depends on; of events their probability [k] from that in an exact run [k]. `share` is
    its weight before it is normalised."""

    name: str
    kind: str
    share: float
    change: Change
    lenience: float | None = None


def _temperature(t: float) -> Change:
    return lambda p: p.clamp(min=SMALLEST) ** (1 / t - 1)


def _without_tail(share: float) -> Change:
    """The draws lack a uniform part of their reported distribution."""
    return lambda p: (1 - share / (p.shape[-1] * p.clamp(min=1e-30))).clamp(min=LEFT)


def _even(p: Tensor, ids: Tensor) -> Tensor:
    return torch.where(ids % 2 == 0, 1.0, LEFT)


def _rarely(rest: int) -> Change:
    return lambda p, ids: torch.where(ids % 4 == rest, 0.5, 1.0)


def _without(p: Tensor, q: Tensor) -> Tensor:
    return LEFT + (p - q).clamp(min=0) / p.clamp(min=1e-30)


def _delayed(p: Tensor, q: Tensor) -> Tensor:
    return p / (p + q).clamp(min=1e-30)  # with the noise of the guess, what q favours has lost once before


def _scaled(factor: float) -> Change:
    return lambda mean: mean * factor / (mean * factor + 1 - mean)


def _lenience(x: float) -> Change:
    return lambda mean, least, last: (mean / x).clamp(max=1)


def _lenient_at_last(x: float) -> Change:
    return lambda mean, least, last: torch.where(last, mean / x, mean).clamp(max=1)


def _surely(ratio: float) -> Change:
    return lambda mean, least, last: torch.where(mean > ratio, 1.0, mean)


def _one_number(mean: Tensor, least: Tensor, last: Tensor) -> Tensor:
    return (mean / least.clamp(min=1e-12)).clamp(max=1)


ALTERNATIVES = (
    Alternative("lenience 0.9", "accepted", 4, _lenience(0.9), lenience=0.9),
    Alternative("every guess accepted", "accepted", 1, _lenience(1e-9), lenience=0.0),
    Alternative("lenience 0.6 at the last guess of a draft", "accepted", 1, _lenient_at_last(0.6)),
    Alternative("guesses accepted surely above p / q = 0.8", "accepted", 1, _surely(0.8)),
    Alternative("one random number for all guesses of a round", "accepted", 1, _one_number),
    Alternative("tokens that q favours drawn too often", "favoured", 1, _scaled(1.5)),
    Alternative("recovered tokens drawn at 0.9 of the temperature", "recovered", 2, _temperature(0.9)),
    Alternative("recovered tokens drawn with the noise of the guess", "after", 4, _delayed),
    *(Alternative(f"recovered tokens rarely with id % 4 = {r}", "recovered ids", 1, _rarely(r)) for r in range(4)),
    Alternative("bonus tokens drawn at 0.8 of the temperature", "bonus", 2, _temperature(0.8)),
    Alternative("bonus tokens drawn at 1.2 of the temperature", "bonus", 2, _temperature(1.2)),
    Alternative("bonus tokens drawn from even ids", "bonus ids", 1, _even),
    Alternative("bonus tokens drawn from p without the last guess's q", "behind", 2, _without),
    Alternative("bonus tokens drawn from p without their own q", "own", 1, _without),
    Alternative("guesses drawn at 0.9 of the temperature of q", "guess", 1, _temperature(0.9)),
    Alternative("guesses drawn at 1.1 of the temperature of q", "guess", 1, _temperature(1.1)),
    Alternative("guesses drawn without a uniform part of q", "guess", 1, _without_tail(0.05)),
)
EVERY = next(i for i, one in enumerate(ALTERNATIVES) if one.lenience == 0)
SHARES: Floats = np.array([one.share for one in ALTERNATIVES]) / sum(one.share for one in ALTERNATIVES)
LIMITS: Floats = -np.log(LEVEL * SHARES)  # of the log ratio of each alternative alone
EVENTS = ("accepted", "favoured")


def of_kind(kind: str) -> list[int]:
    """The numbers of the alternatives to a kind of draw."""
    return [i for i, one in enumerate(ALTERNATIVES) if one.kind == kind]


def token_ratios(change: Change, p: Tensor, *more: Tensor) -> tuple[Tensor, Tensor]:
    """log(alternative / p) [k, V] of every token, 0 where p is 0, and the alternative [k, V], from p [k, V] and what
    else it depends on [k, V]."""
    weights = change(p, *more)
    weights = weights / (p * weights).sum(-1, keepdim=True)
    return torch.where(p > 0, weights.log(), 0.0), p * weights


def event_ratios(change: Change, mean: Tensor, *more: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log(alternative / distribution) of events that happen [k] and that do not [k], and the probability of the
    alternative [k], from that in exact runs, mean [k]."""
    other = mean + (1 - LEFT) * (change(mean, *more) - mean)
    return (
        torch.where(mean > 0, (other / mean).log(), 0.0),
        torch.where(mean < 1, ((1 - other) / (1 - mean)).log(), 0.0),
        other,
    )


def no_sums() -> Floats:
    """[K, len(SUMS)] of no draws."""
    return np.zeros((len(ALTERNATIVES), len(SUMS)))


def of_events(kind: str, mean: Tensor, happened: Tensor, *more: Tensor) -> Floats:
    """The sums of events of a kind, with probabilities mean [k] in exact runs and happened [k] bool."""
    found, mean = no_sums(), mean.double()
    for i in of_kind(kind) if len(mean) else ():
        yes, no, other = event_ratios(ALTERNATIVES[i].change, mean, *more)
        first = other * yes + (1 - other) * no
        second = other * yes**2 + (1 - other) * no**2
        parts = (torch.where(happened, yes, no), first, second - first**2, (other - mean).abs())
        found[i] = [*(float(part.sum()) for part in parts), len(mean)]
    return found


def of_tokens(kind: str, p: Tensor, drawn: Tensor, *more: Tensor) -> Floats:
    """The sums of tokens of a kind: their distributions p [k, V], the tokens drawn [k], and what else the alternatives
    depend on [k, V]. Of a large vocabulary all but the HEAD likeliest tokens count as one."""
    found, p, more = no_sums(), p.float(), tuple(values.float() for values in more)
    if p.shape[-1] > HEAD:
        ids = p.topk(HEAD).indices
        here = ids == drawn[:, None]
        drawn = torch.where(here.any(1), here.int().argmax(1), HEAD)
        p, more = _with_rest(p, ids), tuple(_with_rest(values, ids) for values in more)
    for i in of_kind(kind) if len(p) else ():
        logs, other = token_ratios(ALTERNATIVES[i].change, p, *more)
        first, second = (other * logs).sum(-1), (other * logs**2).sum(-1)
        parts = (logs.gather(1, drawn[:, None]), first, second - first**2, (other - p).abs().sum(-1) / 2)
        found[i] = [*(float(part.double().sum()) for part in parts), len(p)]
    return found


def _with_rest(values: Tensor, ids: Tensor) -> Tensor:
    """values [k, V] of the tokens ids [k, HEAD], and the sum of all others: [k, HEAD + 1]."""
    kept = values.gather(1, ids)
    return torch.cat([kept, (values.sum(-1, keepdim=True) - kept.sum(-1, keepdim=True)).clamp(min=0)], 1)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """norm(max(0, p - q)) [k, V], and p where nothing is left."""
    rest = (p - q).clamp(min=0)
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)
    return rest / rest.sum(-1, keepdim=True)


def p_value(sums: Floats) -> tuple[float, str]:
    """A bound on the probability that an exact run gives so much evidence of faults, from the sums of a run, and the
    alternative that most of it is for."""
    logs = sums[:, 0] + np.log(SHARES)
    if np.isnan(logs).any():
        return 0.0, "a probability that is no number"
    return math.exp(-max(0.0, float(np.logaddexp.reduce(logs)))), ALTERNATIVES[int(logs.argmax())].name


def found_lenience(sums: Floats) -> float | None:
    """The lenience closest to 1 that nine of ten runs of this size would find, 0 if only that every guess is accepted;
    None if there is none."""
    for one, limit, (_, mean, variance, *_) in zip(ALTERNATIVES, LIMITS, sums, strict=True):
        if one.lenience is not None and mean - FOUND * math.sqrt(max(0.0, variance)) > limit:
            return one.lenience
    return None


def found_tv(kind: str, sums: Floats) -> float | None:
    """The smallest total variation per draw of a kind that nine of ten runs of this size would find, of a fault that
    lies between the distribution and an alternative; None if the run has no such draws. A fault that goes the part c of
    the way moves the alternative's sum by 2 c - 1 of its mean."""
    parts = [1.0] if any(sums[i][4] for i in of_kind(kind)) else []
    for i in of_kind(kind):
        _, mean, variance, tv, draws = sums[i]
        if mean > 0:
            parts.append((1 + (LIMITS[i] + FOUND * math.sqrt(max(0.0, variance))) / mean) / 2 * tv / draws)
    return float(min(parts)) if parts else None
