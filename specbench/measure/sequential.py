"""The test of losslessness above temperature 0: what was drawn, under the distribution that it should have and others.

Each draw of a run has a distribution that is known before it: a guess is drawn from q; it is accepted with probability
min(1, p / q); a recovered token is drawn from norm(max(0, p - q)); a bonus token, or that of a plain step, from p. An
alternative says what a fault would make of one kind of draw. The product over draws of alternative / distribution is a
martingale with mean 1 in an exact run, and so is the mean of such products with fixed weights: it exceeds 1 / a with
probability a at most (Ville 1939), for runs of any size.

n positions of a text, k draws of a kind, V vocabulary, K alternatives.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from specbench.measure.recorder import Draws, Guess
from specbench.measure.sums import Floats

LEVEL = 1 / 200  # the probability that an exact run fails is at most this
FOUND = 1.28  # standard deviations below the mean that nine of ten values exceed
SMALLEST = math.exp(-10)  # probabilities below it are tilted as this one is
LEFT = 0.02  # of the distribution stays in every alternative: no single draw decides against one
MARGIN = 1.05  # q / p above which the drafter favours a token
SURE = 1 + 1e-6  # p / q from which a guess is accepted whatever rounding does
HARMLESS = 1e-3  # nats by which accepting a guess surely differs: below it the drafter is the target
Change = Callable[..., Tensor]
Kept = Sequence[tuple[int, Tensor]]  # distributions [m, V] from positions on
Readings = Sequence[dict[str, Any]]  # of the texts of a run


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


def by_id(factor: float, rest: int, divisor: int) -> Change:
    """Tokens whose id leaves this rest are drawn with `factor` times their probability."""
    return lambda p: torch.where(torch.arange(p.shape[-1], device=p.device) % divisor == rest, factor, 1.0)


# Events "accepted" depend on m = min(1, p / q), the least m of the round before, and whether it is the last guess.
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
    # Three of the four rests, for at most 20 alternatives.
    *(Alternative(f"recovered tokens rarely with id % 4 = {r}", "recovered", 1, by_id(0.5, r, 4)) for r in (1, 2, 3)),
    Alternative("bonus tokens drawn at 0.8 of the temperature", "bonus", 2, warmer(0.8)),
    Alternative("bonus tokens drawn at 1.2 of the temperature", "bonus", 2, warmer(1.2)),
    Alternative("bonus tokens drawn from even ids", "bonus", 1, by_id(LEFT, 1, 2)),
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
    """A bound on the probability that an exact run has such sums, and the alternative that they are most for."""
    logs = sums[:, 0] + np.log(SHARES)
    if np.isnan(logs).any():
        return 0.0, "a probability that is no number"
    return math.exp(-max(0.0, float(np.logaddexp.reduce(logs)))), ALTERNATIVES[int(logs.argmax())].name


def found_by(sums: Floats) -> list[str]:
    """The alternatives that nine of ten runs would find: under them the sum is FOUND deviations beyond its limit."""
    margins = sums[:, 1] - FOUND * np.sqrt(sums[:, 2].clip(min=0)) - LIMITS
    return [one.name for one, margin in zip(ALTERNATIVES, margins, strict=True) if margin > 0]


def draw_sums(
    draws: Draws, tokens: Tensor, own: Tensor | None = None, beside: Sequence[int] = ()
) -> tuple[Floats, int]:
    """The sums of the test over the tokens [n] of one text, and how many draws have probability 0. `own` is the logits
    [m, V] of the drafter's stock module at the first m of them, if it was read; `beside` what other texts have at their
    positions, -1 for nothing."""
    guesses = torch.tensor(draws.guesses, dtype=torch.double).reshape(-1, len(Guess._fields)).T
    at, x = guesses[:2].long().to(tokens.device)
    guess, tested = torch.zeros_like(tokens), torch.zeros_like(tokens, dtype=torch.bool)
    certain = torch.zeros_like(tested)
    guess[at], tested[at], certain[at] = x, True, (guesses[3] == 1).to(at.device)
    accepted = tested & (tokens == guess)
    sums, impossible = _acceptance(draws.rule, guesses, accepted[at].cpu())
    if not draws.target:
        return sums, impossible
    p, p_kept = _rows(draws.target, len(tokens), draws.target[0][1])
    q, q_kept = _rows(draws.drafter, len(tokens), draws.target[0][1])
    point_mass = certain & ~q_kept
    q[point_mass] = F.one_hot(guess[point_mass], p.shape[-1]).to(q.dtype)
    judged, bonus, sampled = p_kept & (q_kept | point_mass) & tested, p_kept & ~tested, q_kept & tested

    def add(kind: str, where: Tensor, *parts: Tensor) -> None:
        sums[:] += sums_of(kind, *(part[where] for part in parts))

    add("guess", sampled, guess, q)
    favoured = q > MARGIN * p
    happened = favoured.gather(1, tokens[:, None])[:, 0]
    add("favoured", judged, happened, (p * favoured).sum(-1).clamp(max=1))
    add("bonus", bonus, tokens, p)
    add("behind", bonus[1:] & judged[:-1], tokens[1:], p[1:], q[:-1])
    if own is not None:
        m = len(own)
        add("own", bonus[:m], tokens[:m], p[:m], own.double().softmax(-1))
    others = torch.tensor([*beside, *[-1] * len(tokens)][: len(tokens)], device=tokens.device)
    # Whether guessed or not, a token is drawn from p.
    add("beside", p_kept & (others >= 0), tokens, p, F.one_hot(others.clamp(min=0), p.shape[-1]))
    impossible += _zero(p, tokens, p_kept) + _zero(q, guess, sampled)
    if draws.rule is not None:
        rejected = judged & ~accepted
        rest = residual(p, F.one_hot(guess, p.shape[-1]) if draws.rule == "p" else q)
        add("recovered", rejected, tokens, rest)
        add("after", rejected, tokens, rest, q)
        impossible += _zero(rest, tokens, rejected)
    return sums, impossible


def _rows(kept: Kept, n: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """The first n distributions [n, V] in float64, 0 where not kept, and where they were [n]; as `like` [.., V]."""
    found = torch.zeros(n, like.shape[-1], dtype=torch.double, device=like.device)
    for begin, rows in kept:
        found[begin : begin + len(rows)] = rows[: max(0, n - begin)]
    mass = found.sum(-1, keepdim=True)
    return found / mass.clamp(min=1e-300), mass[:, 0] > 0


def _acceptance(rule: str | None, guesses: Tensor, stands: Tensor) -> tuple[Floats, int]:
    """The sums of whether guesses [6, K] stand [K], by the decoder's own p and q, and how many are impossible."""
    if rule is None or not len(stands):
        return no_sums(), 0
    p, q, first, last = guesses[2:]
    ratio = torch.where(q > 0, p / q, 1.0) if rule == "p / q" else p
    mean, least = ratio.clamp(max=1), list[float]()
    for begins, before in zip(first, [1.0, *mean.tolist()], strict=False):
        least.append(1.0 if begins else max(1e-12, min(least[-1], before)))
    wrong = (q == 0) | ((mean == 0) & stands) | ((ratio > SURE) & ~stands)
    return sums_of("accepted", stands, mean, torch.tensor(least, dtype=torch.double), last), int(wrong.sum())


def _zero(p: Tensor, drawn: Tensor, where: Tensor) -> int:
    """How many of the tokens drawn [n] have probability 0 by p [n, V], of those `where` [n] says."""
    return int((where & (p.gather(1, drawn[:, None])[:, 0] == 0)).sum())


def judge_draws(readings: Readings, details: dict[str, Any]) -> tuple[bool | None, str, list[str]]:
    """The verdict above temperature 0 by the readings of a run's texts, why, and the faults that nine of ten such runs
    would have found. Adds to the details a bound on the probability that an exact run gives such evidence."""
    sums: Floats = np.sum([reading["sums"] for reading in readings], axis=0)
    (statistic, fault), found = p_value(sums), found_by(sums)
    impossible = sum(reading["impossible"] for reading in readings)
    details |= {"p_value": statistic, "level": LEVEL, "impossible": impossible}
    if impossible:
        return False, f"{impossible} draws have probability 0", found
    if statistic < LEVEL:
        return False, f"what was drawn is far likelier under another distribution: {fault}", found
    # Of verifiers whose acceptance follows from more than p and q of the guess, only the tokens are looked at.
    by_rule = any(reading["rule"] for reading in readings)
    least = EVERY if by_rule else FAVOURED
    same = by_rule and sums[least, 1] <= HARMLESS * sum(reading["tested"] for reading in readings)
    if ALTERNATIVES[least].name not in found and not same:
        return None, "too little was drawn: a verifier that accepts every guess would not have been found", found
    return True, "", found
