"""The test of losslessness above temperature 0: what was drawn, under the law it should have and under other laws.

Each draw of a run has a law that is known before it: a guess is drawn from q; it stands with probability
min(1, p / q); a recovered token is drawn from norm(max(0, p - q)); a bonus token, or that of a plain step, from p. An
alternative says what a fault would make of one kind of draw. The product over draws of alternative / law is a
martingale, with mean 1 in an exact run. So is the mean of such products with weights that are fixed before: it exceeds
1 / a with probability a at most (Ville 1939), for runs of any size and any number of alternatives.

k draws, V vocabulary, K alternatives.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from specbench.stats.estimates import Floats

VERDICT_LEVEL = 1 / 200  # the probability that an exact run fails is at most this
FOUND = 1.28  # standard deviations: a fault whose sum is beyond the limit by this much is found in nine of ten runs
SMALLEST = math.exp(-10)  # probabilities below it are tilted as this one is
HEAD = 4096  # tokens of a vocabulary that are told apart
LEFT = 0.02  # of the law stays in every alternative: no single draw decides against one
SUMS = 5  # of each alternative: log ratio of what was drawn, its mean and variance under it, total variation, draws
CLASSES = (*(f"id % 2 = {i}" for i in range(2)), *(f"id % 8 = {i}" for i in range(8)),
           *(f"ids in eighth {i + 1} of the vocabulary" for i in range(8)))  # fmt: skip
LawChange = Callable[..., Tensor]


@dataclass(frozen=True)
class Alternative:
    """What a fault would make of the draws of a `kind`. `change` gives weights [k, V] of tokens, from their law [k, V]
    and what else the fault depends on, or other probabilities of events. `share` is its weight before it is
    normalised."""

    told: str
    kind: str
    share: float
    change: LawChange
    column: int = 0  # of the events: the class of tokens
    lenience: float | None = None


def warmer(temperature: float) -> LawChange:
    """Drawn at another temperature, relative to the law's."""
    return lambda law: law.clamp(min=SMALLEST) ** (1 / temperature - 1)


def uniform(share: float) -> LawChange:
    """A part of the draws is uniform; below 0 the law has such a part, and the draws have not."""
    most = 1e6 if share > 0 else (1 - LEFT) / -share
    return lambda law: 1 + share * (1 / (law.shape[-1] * law.clamp(min=1e-12)) - 1).clamp(max=most)


def of_top(k: int) -> LawChange:
    """Drawn from the k likeliest tokens."""
    return lambda law: torch.where(law >= law.topk(min(k, law.shape[-1])).values[:, -1:], 1.0, LEFT)


def without(law: Tensor, q: Tensor) -> Tensor:
    """Drawn from norm(max(0, law - q)), with another q [k, V]."""
    return LEFT + (law - q).clamp(min=0) / law.clamp(min=1e-30)


def delayed(law: Tensor, q: Tensor) -> Tensor:
    """Drawn with the noise of a guess from q [k, V], which it lost: what q favours lost then, too."""
    return law / (law + q).clamp(min=1e-30)


def scaled(factor: float) -> LawChange:
    """An event that is so much likelier, against that it does not happen."""
    return lambda mean, *more: mean * factor / (mean * factor + 1 - mean)


def with_lenience(lenience: float, place: int = 0) -> LawChange:
    """Lenience at every place of a draft, or at one from 1 on; above 1 guesses are accepted too rarely."""

    def change(mean: Tensor, places: Tensor, least: Tensor) -> Tensor:
        found = (mean / lenience).clamp(max=1)
        return torch.where(places == place, found, mean) if place else found

    return change


def surely(ratio: float) -> LawChange:
    """Every guess with a larger p / q is accepted."""
    return lambda mean, *more: torch.where(mean > ratio, 1.0, mean)


def one_number(mean: Tensor, places: Tensor, least: Tensor) -> Tensor:
    """One uniform number for all guesses of a round, from the `least` probability of those before, [k]."""
    return (mean / least.clamp(min=1e-12)).clamp(max=1)


LENIENCE = (0.98, 0.95, 0.93, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5)
PLACES = 6  # of a draft, that are looked at alone
TEMPERATURES = (0.25, 0.5, 0.7, 0.8, 0.9, 1.1, 1.2, 1.5)
NAMES = {"token": "tokens", "untested": "bonus tokens", "recovered": "recovered tokens", "guess": "guesses"}


def _of_guesses() -> Iterator[Alternative]:
    """Alternatives to how guesses are accepted, and to which tokens stand where they were tested."""
    for x in LENIENCE:
        yield Alternative(f"lenience {x}", "stands", 40 if x == 0.9 else 8, with_lenience(x), lenience=x)
    yield Alternative("guesses accepted too rarely", "stands", 8, with_lenience(1.1))
    yield Alternative("guesses accepted too rarely", "stands", 4, with_lenience(1.4))
    for place in range(1, PLACES + 1):
        for x in (0.8, 0.5, 1.25):
            yield Alternative(f"lenience {x} at guess {place}", "stands", 2, with_lenience(x, place))
    for x in (0.9, 0.8, 0.6):
        yield Alternative(f"guesses accepted surely above p / q = {x}", "stands", 4, surely(x))
    yield Alternative("one random number for all guesses of a round", "stands", 4, one_number)
    yield Alternative("every guess accepted", "stands", 8, with_lenience(1e-9), lenience=0.0)
    for x in (1.1, 1.25, 1.6, 2.5, 10):
        yield Alternative("tokens that q favours are drawn too often", "favoured", 12, scaled(x))
        yield Alternative("tokens that q favours are drawn too rarely", "favoured", 4, scaled(1 / x))


def _of_tokens() -> Iterator[Alternative]:
    """Alternatives to the laws of tokens and guesses."""
    for kind, words in NAMES.items():
        for x in TEMPERATURES if kind != "token" else TEMPERATURES[3:-1]:
            yield Alternative(f"{words} drawn at {x} of the temperature", kind, 12 if x == 0.9 else 4, warmer(x))
    for kind in ("untested", "recovered"):
        for column, ids in enumerate(CLASSES):
            for x in (LEFT, 0.4):
                yield Alternative(f"{NAMES[kind]} drawn too rarely with {ids}", f"{kind} class", 0.2, scaled(x), column)
    for x in (0.05, -0.05):
        yield Alternative("guesses drawn with more or less uniform noise than q", "guess", 4, uniform(x))
    yield Alternative("guesses drawn from the top 50 of q", "guess", 4, of_top(50))
    yield Alternative("recovered tokens drawn with the noise of the guess", "after", 24, delayed)
    yield Alternative("bonus tokens drawn from p without the last guess's q", "bonus", 12, without)
    yield Alternative("bonus tokens drawn from p without their own q", "own place", 4, without)


ALTERNATIVES = (*_of_guesses(), *_of_tokens())
EVERY = next(i for i, one in enumerate(ALTERNATIVES) if one.lenience == 0)  # guess accepted
SHARES: Floats = np.array([one.share for one in ALTERNATIVES]) / sum(one.share for one in ALTERNATIVES)
LIMITS: Floats = -np.log(VERDICT_LEVEL * SHARES)  # of the log ratio of each alternative alone
OF_KIND = {kind: [i for i, a in enumerate(ALTERNATIVES) if a.kind == kind] for kind in {a.kind for a in ALTERNATIVES}}


@cache
def classes(vocab_size: int, device: torch.device) -> Tensor:
    """[V, 18] float64: which of the CLASSES each token is in."""
    ids = torch.arange(vocab_size, device=device)
    parts = [F.one_hot(of, n) for of, n in ((ids % 2, 2), (ids % 8, 8), (ids * 8 // vocab_size, 8))]
    return torch.cat(parts, 1).double()


def log_ratios(change: LawChange, law: Tensor, *more: Tensor) -> Tensor:
    """log(alternative / law) [k, V] of every token, from laws [k, V] and what else `change` depends on; 0 where the law
    is 0."""
    weights = change(law, *more)
    mass = (law * weights).sum(-1, keepdim=True)
    return torch.where(law > 0, (weights / mass).log(), 0.0)


def of_drawn(change: LawChange, law: Tensor, drawn: Tensor, *more: Tensor) -> Tensor:
    """`log_ratios` [k] of the tokens drawn [k]."""
    weights = change(law, *more)
    return (weights.gather(1, drawn[:, None])[:, 0] / (law * weights).sum(-1)).log()


def no_sums() -> Floats:
    """[K, SUMS] of no draws."""
    return np.zeros((len(ALTERNATIVES), SUMS))


def of_tokens(kind: str, law: Tensor, drawn: Tensor, *others: Tensor) -> Floats:
    """[K, SUMS] of tokens of a kind: laws [k, V], tokens drawn [k], and what else its alternatives depend on [k, V]. Of
    a large vocabulary all but the HEAD likeliest tokens count as one."""
    found, law, others = no_sums(), law.float(), tuple(other.float() for other in others)
    if law.shape[-1] > HEAD:
        ids = law.topk(HEAD).indices
        here = ids == drawn[:, None]
        drawn = torch.where(here.any(1), here.long().argmax(1), HEAD)
        law, others = _with_rest(law, ids), tuple(_with_rest(other, ids) for other in others)
    for i in OF_KIND[kind] if len(law) else ():
        change, few = ALTERNATIVES[i].change, [values[::4] for values in (law, *others)]  # they stand for all rows
        moments = torch.stack(_moments(few[0], log_ratios(change, *few))) * (len(law) / len(few[0]))
        found[i] = [float(of_drawn(change, law, drawn, *others).sum()), *moments.tolist(), len(law)]
    return found


def _with_rest(values: Tensor, ids: Tensor) -> Tensor:
    """values [k, V] of the tokens ids [k, HEAD], and the sum of all others: [k, HEAD + 1]."""
    kept = values.gather(1, ids)
    return torch.cat([kept, (values.sum(-1, keepdim=True) - kept.sum(-1, keepdim=True)).clamp(min=0)], 1)


def of_events(kind: str, mean: Tensor, happened: Tensor, *more: Tensor) -> Floats:
    """[K, SUMS] of events of a kind, with probabilities mean [k, C] in exact runs and happened [k, C] bool."""
    found = no_sums()
    if len(mean):
        ratio, law = event_ratios(kind, mean, *more)
        yes = happened[:, columns(kind)]
        drawn = torch.where(yes, ratio[..., 1], ratio[..., 0])
        sums = torch.stack([drawn.sum(0), *_moments(law, ratio), torch.full_like(drawn[0], len(mean))], 1)
        found[OF_KIND[kind]] = sums.cpu()
    return found


def columns(kind: str) -> list[int]:
    """The classes of tokens that the alternatives of a kind of events are about, [A]."""
    return [ALTERNATIVES[i].column for i in OF_KIND[kind]]


def event_ratios(kind: str, mean: Tensor, *more: Tensor) -> tuple[Tensor, Tensor]:
    """log(alternative / law) [k, A, 2] that events do not and do happen, for the A alternatives of a kind, and the law
    [k, A, 2], from probabilities mean [k, C]."""
    m = mean[:, columns(kind)]
    changed = [ALTERNATIVES[i].change(own, *more) for i, own in zip(OF_KIND[kind], m.unbind(1), strict=True)]
    other = m + (1 - LEFT) * (torch.stack(changed, 1) - m)
    law = torch.stack([1 - m, m], -1)
    return torch.where(law > 0, (torch.stack([1 - other, other], -1) / law).log(), 0.0), law


def _moments(law: Tensor, ratio: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sums over k draws of mean and variance of a log ratio under an alternative, and of its total variation, from law
    and ratio [k, ..., V]."""
    other = law * ratio.exp()
    gain = other * ratio
    mean, square, tv = gain.sum(-1), (gain * ratio).sum(-1), (other - law).abs().sum(-1) / 2
    return mean.sum(0), (square - mean.square()).sum(0), tv.sum(0)


def p_value_of_sums(sums: Floats) -> tuple[float, str]:
    """A bound on the probability that an exact run gives so much evidence, from the sums [K, SUMS] of a run, and the
    alternative that most of it is for."""
    logs = sums[:, 0] + np.log(SHARES)
    if np.isnan(logs).any():
        return 0.0, "a probability that is no number"
    total = float(np.logaddexp.reduce(logs))
    return math.exp(-max(0.0, total)), ALTERNATIVES[int(logs.argmax())].told


def found_lenience(sums: Floats) -> float | None:
    """The lenience closest to 1 that nine of ten runs of this size would find, 0 if only that every guess is accepted;
    None if there is none."""
    for one, limit, (_, mean, variance, _, _) in zip(ALTERNATIVES, LIMITS, sums, strict=True):
        if one.lenience is not None and mean - FOUND * math.sqrt(max(0.0, variance)) > limit:
            return one.lenience
    return None


def found_tv(kind: str, sums: Floats) -> float | None:
    """The smallest total variation, per draw of a kind, that nine of ten runs of this size would find, of a fault that
    lies between the law and an alternative; None if the run has no such draws.

    A fault that goes the part c of the way moves the alternative's sum by 2 c - 1 of its mean."""
    parts = []
    for i in OF_KIND[kind]:
        _, mean, variance, tv, draws = sums[i]
        if mean > 0:
            part = (1 + (LIMITS[i] + FOUND * math.sqrt(max(0.0, variance))) / mean) / 2
            parts.append(part * tv / draws)
    return float(min(1.0, *parts)) if parts else None
