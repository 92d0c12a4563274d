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
FOUND = 1.28  # standard deviations below the mean that nine of ten values exceed
SMALLEST = math.exp(-10)  # probabilities below it are tilted as this one is
LEFT = 0.02  # of the distribution stays in every alternative: no single draw decides against one
MARGIN = 1.05  # q / p above which the drafter favours a token
SURE = 1 + 1e-6  # p / q from which a guess is accepted whatever rounding does
Change = Callable[..., Tensor]


@dataclass(frozen=True)
class Alternative:
    """What a fault would make of draws of a `kind`. `change` gives weights [k, V] of tokens from their distribution and
    what else the fault depends on; of events their probability [k], cut at 1, from that in exact runs. `share` is its
    own weight among the alternatives, before it is normalised."""

    name: str
    kind: str
    share: float
    change: Change


def warmer(temperature: float) -> Change:
    """Drawn at another temperature, relative to the distribution's."""
    return lambda p: p.clamp(min=SMALLEST) ** (1 / temperature - 1)


def without(p: Tensor, q: Tensor) -> Tensor:
    """Drawn from norm(max(0, p - q)), with the q of another position."""
    return LEFT + (p - q).clamp(min=0) / p.clamp(min=1e-30)


def attracted(p: Tensor, mark: Tensor) -> Tensor:
    """The token that `mark` [k, V] has a 1 at is drawn in one case of twenty more."""
    return 0.95 + 0.05 * mark / p.clamp(min=1e-30)


def even(p: Tensor) -> Tensor:
    """Drawn from even ids."""
    return 1 - (1 - LEFT) * (torch.arange(p.shape[-1], device=p.device) % 2)


def rarely(rest: int) -> Change:
    """Tokens of one rest of ids are drawn half as often: three of the four rests, for at most 20 alternatives."""
    return lambda p: torch.where(torch.arange(p.shape[-1], device=p.device) % 4 == rest, 0.5, 1.0)


# Events of the kind "accepted" depend on m = min(1, p / q), on the least m of the round's guesses before, and on
# whether the guess is the last one of its draft.
ALTERNATIVES = (
    Alternative("lenience 0.9", "accepted", 4, lambda m, least, last: m / 0.9),
    Alternative("every guess accepted", "accepted", 1, lambda m, least, last: 1e9 * m),
    Alternative("lenience 0.6 at a draft's last guess", "accepted", 1, lambda m, least, last: m / (1 - 0.4 * last)),
    Alternative("p / q above 0.8 accepted surely", "accepted", 1, lambda m, least, last: torch.where(m > 0.8, 1.0, m)),
    Alternative("one random number for all guesses of a round", "accepted", 1, lambda m, least, last: m / least),
    Alternative("tokens that q favours drawn too often", "favoured", 1, lambda m: 1.5 * m / (1 + 0.5 * m)),
    Alternative("recovered tokens drawn at 0.9 of the temperature", "recovered", 2, warmer(0.9)),
    # With the noise of the guess, what q favours has lost once before.
    Alternative("recovered tokens drawn with the noise of the guess", "after", 4, lambda p, q: p / (p + q + 1e-30)),
    *(Alternative(f"recovered tokens rarely with id % 4 = {r}", "recovered", 1, rarely(r)) for r in (1, 2, 3)),
    Alternative("bonus tokens drawn at 0.8 of the temperature", "bonus", 2, warmer(0.8)),
    Alternative("bonus tokens drawn at 1.2 of the temperature", "bonus", 2, warmer(1.2)),
    Alternative("bonus tokens drawn from even ids", "bonus", 1, even),
    Alternative("bonus tokens drawn from p without the last guess's q", "behind", 2, without),
    Alternative("bonus tokens drawn from p without their own q", "own", 1, without),
    Alternative("guesses drawn at 0.9 of the temperature of q", "guess", 1, warmer(0.9)),
    Alternative("guesses drawn at 1.1 of the temperature of q", "guess", 1, warmer(1.1)),
    Alternative(
        "guesses drawn without 5 % of uniform q", "guess", 1, lambda p: (1 - 0.05 / (p.shape[-1] * p)).clamp(LEFT)
    ),
    # Over prompts: with the same noise texts have the same tokens at the same positions more often.
    Alternative("one noise for several texts", "beside", 1, attracted),
)
EVERY, FAVOURED = 1, 5  # the numbers of "every guess accepted" and of "tokens that q favours drawn too often"
SHARES: Floats = np.array([one.share for one in ALTERNATIVES]) / sum(one.share for one in ALTERNATIVES)
LIMITS: Floats = -np.log(LEVEL * SHARES)  # of the log ratio of each alternative alone


def log_ratios(change: Change, p: Tensor, *more: Tensor) -> tuple[Tensor, Tensor]:
    """log(alternative / p) [k, V] of every token, 0 where p is 0, and the alternative [k, V], from p [k, V] and what
    else it depends on [k, V]. For events, which happen with probability p [k], those of "no" and "yes" [k, 2]."""
    if p.dim() == 1:
        changed = p + (1 - LEFT) * (change(p, *more).clamp(max=1) - p)
        p, other = (torch.stack([1 - x, x], -1) for x in (p, changed))
        return torch.where(p > 0, (other / p).log(), 0.0), other
    weights = change(p, *more)
    weights = weights / (p * weights).sum(-1, keepdim=True)
    return torch.where(p > 0, weights.log(), 0.0), p * weights


def no_sums() -> Floats:
    """[K, 3] of no draws: log ratios, and their means and variances under the alternatives."""
    return np.zeros((len(ALTERNATIVES), 3))


def sums_of(kind: str, drawn: Tensor, p: Tensor, *more: Tensor) -> Floats:
    """The sums of draws of a kind: tokens drawn [k] from p [k, V], or events that happened [k] bool, which they do with
    probability p [k]; `more` is what else the alternatives depend on."""
    found = no_sums()
    for i, one in enumerate(ALTERNATIVES):
        if one.kind != kind or not len(drawn):
            continue
        logs, other = log_ratios(one.change, p, *more)
        first, second = (other * logs).sum(-1), (other * logs**2).sum(-1)
        parts = (logs.gather(1, drawn[:, None].long()), first, second - first**2)
        found[i] = [float(part.double().sum()) for part in parts]
    return found


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


def found_by(sums: Floats) -> list[str]:
    """The alternatives that nine of ten runs of this size would find: those whose sum is beyond its limit by FOUND
    standard deviations if what was drawn is the alternative's."""
    margins = sums[:, 1] - FOUND * np.sqrt(sums[:, 2].clip(min=0)) - LIMITS
    return [one.name for one, margin in zip(ALTERNATIVES, margins, strict=True) if margin > 0]
