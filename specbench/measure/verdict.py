"""The losslessness verdict of every run: whether the output distribution is the target's.

Each finished text is read once more by the stock modules. The decoder's p and q must be theirs up to rounding. At
temperature 0 every token must have the largest logit, and the text must be plain decoding's, up to ties. Above it no
fault may explain far better what was drawn (`measure/sequential.py`).

n new tokens of a text, V vocabulary, K tested guesses.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from specbench.decoding.sampling import Sampling
from specbench.measure import sequential
from specbench.measure.intervals import Floats
from specbench.measure.record import Facts, Reading, Record
from specbench.measure.recorder import Draws, Guess
from specbench.measure.rounds import finished
from specbench.measure.sequential import MARGIN, SURE, residual, sums_of
from specbench.measure.stock import distance, tie
from specbench.models.reference_forward import FinishedText

MEAN_SHARE = 0.25  # of what rounding explains at most, the mean total variation may reach this
HARMLESS = 1e-3  # nats by which accepting a guess surely differs: below it the drafter is the target
OTHER_Q = "q in decoding is not the stock module's: alpha is not the drafter's own"
Kept = Sequence[tuple[int, Tensor]]  # distributions [m, V] from positions on
Readings = Sequence[dict[str, Any]]
Passed = tuple[bool | None, str]  # and why


def unread(reason: str, error: bool = False) -> Reading:
    """The reading of a text that was not read; with an `error` the run's verdict is not "passed"."""
    return {"unread": reason, "error": error}


def read_text(
    target: Any, drafter: Any, sampling: Sampling, text: FinishedText, plain: Sequence[int], draws: Draws,
    beside: Sequence[int] = (),
) -> Any:  # fmt: skip
    """The `Reading` that goes to `Record.verdict`: a text under the stock modules of target and drafter, beside `plain`
    decoding's new tokens. `sampling` is the configuration's, by which the target's own is judged; `beside` is what
    other texts have at the positions of its new tokens, -1 for nothing."""
    try:
        logits = text.scores(target, sampling)
        found: dict[str, Any] = {"tokens": len(logits), "tested": len(draws.guesses), "rule": draws.rule}
        found |= {"p": compared(logits, draws.target, target.dtype, sampling)}
        own = None
        if reads_q(drafter, target) and len(text.prompt) < drafter.context:
            own = text.scores(drafter.models[0], end=drafter.context)
            found["q"] = _drafter(own, draws, drafter.models[0])
        if sampling.greedy:
            return found | _equality(logits, text.ids, plain, target.dtype, sampling)
        sums, impossible = draw_sums(draws, torch.tensor(text.ids, dtype=torch.long, device=target.device), own, beside)
        return found | {"sums": sums.tolist(), "impossible": impossible}
    except (MemoryError, RuntimeError) as error:  # the run goes on
        return unread(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}", error=True)


def compared(logits: Tensor, kept: Kept, dtype: torch.dtype, sampling: Sampling) -> dict[str, Any]:
    """Of the positions whose distribution was kept: the sums of its total variation from the stock module's, by
    penalised logits [n, V], and of what rounding explains; and how many go beyond that."""
    sums = {"positions": 0, "tv": 0.0, "limit": 0.0, "beyond": 0}
    for begin, decoder in kept:
        stock = logits[begin : begin + len(decoder)]
        tv, limit = distance(stock, decoder[: len(stock)], dtype, sampling)
        more = (len(tv), float(tv.sum()), float(limit.sum()), int((~(tv <= limit)).sum()))  # also if not finite
        sums = {name: sums[name] + own for name, own in zip(sums, more, strict=True)}
    return sums


def _drafter(logits: Tensor, draws: Draws, model: Any) -> dict[str, Any]:
    """How far q is from that of the drafter's stock module, by its penalised logits [n, V]; at temperature 0 how many
    guesses are not its likeliest token."""
    if not model.sampling.greedy:
        return compared(logits, draws.drafter, model.dtype, model.sampling)
    guesses = [guess for guess in draws.guesses if guess.at < len(logits)]
    read = logits[[guess.at for guess in guesses]]
    _, right = short_of(read, [guess.token for guess in guesses], model.dtype, model.sampling)
    return {"positions": len(guesses), "beyond": int((~right).sum())}


def short_of(logits: Tensor, tokens: Sequence[int], dtype: torch.dtype, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """By how much the logits of n tokens are below the largest of logits [n, V], and whether rounding explains it."""
    own = logits.gather(1, torch.tensor([*tokens], dtype=torch.long, device=logits.device)[:, None])[:, 0]
    short = logits.amax(-1).double() - own.double()
    return short, short <= tie(logits, dtype, sampling)  # false if one is not a number


def reads_q(drafter: Any, target: Any) -> bool:
    """Whether q can be read again from a finished text: of one model whose q depends on the text alone, at temperature
    0 of chains of its likeliest tokens."""
    alone = drafter.reads_text and len(drafter.models) == 1 and not drafter.only_likeliest
    return alone and not (target.sampling.greedy and (drafter.trees or not drafter.models[0].sampling.greedy))


def _equality(
    logits: Tensor, ids: Sequence[int], plain: Sequence[int], dtype: torch.dtype, sampling: Sampling
) -> dict[str, Any]:
    """At temperature 0, from logits [n, V]: how many of the n tokens `ids` do not have the largest logit, how many are
    ties, and what the first difference from plain decoding's text is: none (""), a "tie" or a "bug"."""
    short, right = short_of(logits, ids, dtype, sampling)
    place = next((i for i, (ours, other) in enumerate(zip(ids, plain, strict=False)) if ours != other), None)
    if place is None:
        kind = "" if len(ids) == len(plain) else "bug"  # one of them has ended, with the same tokens
    else:
        _, tied = short_of(logits[place, None], [plain[place]], dtype, sampling)
        kind = "tie" if right[place] and tied else "bug"
    return {"wrong": int((~right).sum()), "ties": int((right & (short > 0)).sum()), "divergence": kind}


def draw_sums(
    draws: Draws, tokens: Tensor, own: Tensor | None = None, beside: Sequence[int] = ()
) -> tuple[Floats, int]:
    """The sums of the sequential test over the tokens [n] of one text, and how many draws have probability 0. `own` is
    the logits [m, V] of the drafter's stock module at the first m of them, if it was read; `beside` what other texts
    have at their positions, -1 for nothing."""
    guesses = torch.tensor(draws.guesses, dtype=torch.double).reshape(-1, len(Guess._fields)).T
    at, x = guesses[:2].long().to(tokens.device)
    guess, tested = torch.zeros_like(tokens), torch.zeros_like(tokens, dtype=torch.bool)
    guess[at], tested[at] = x, True
    accepted = tested & (tokens == guess)
    sums, impossible = _acceptance(draws.rule, guesses, accepted[at].cpu())
    if not draws.target:
        return sums, impossible
    p, p_kept = _rows(draws.target, len(tokens), draws.target[0][1])
    q, q_kept = _rows(draws.drafter, len(tokens), draws.target[0][1])
    point_mass = torch.zeros_like(q_kept)
    point_mass[at] = (guesses[3] == 1).to(at.device)
    point_mass &= ~q_kept
    q[point_mass] = F.one_hot(guess[point_mass], p.shape[-1]).to(q.dtype)
    judged, bonus, sampled = p_kept & (q_kept | point_mass) & tested, p_kept & ~tested, q_kept & tested

    def add(kind: str, where: Tensor, drawn: Tensor, p: Tensor, *more: Tensor) -> None:
        nonlocal sums
        sums = sums + sums_of(kind, drawn[where], p[where], *(each[where] for each in more))

    add("guess", sampled, guess, q)
    favoured = q > MARGIN * p
    happened = favoured.gather(1, tokens[:, None])[:, 0]
    add("favoured", judged, happened, (p * favoured).sum(-1).clamp(max=1))
    add("bonus", bonus, tokens, p)
    after_guess = bonus & judged.roll(1)
    after_guess[:1] = False
    add("behind", after_guess, tokens, p, q.roll(1, 0))
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


def _acceptance(rule: str | None, guesses: Tensor, stands: Tensor) -> tuple[Floats, int]:
    """The sums of whether guesses [6, K] stand [K], whose probability follows from the decoder's own p and q."""
    if rule is None or not len(stands):
        return sequential.no_sums(), 0
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


def _rows(kept: Kept, n: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """The distributions of the first n positions [n, V] in float64, 0 where they were not kept, and where they were
    [n]; V and the device are those of `like` [.., V]."""
    found = torch.zeros(n, like.shape[-1], dtype=torch.double, device=like.device)
    for begin, rows in kept:
        found[begin : begin + len(rows)] = rows[: max(0, n - begin)]
    mass = found.sum(-1, keepdim=True)
    return found / mass.clamp(min=1e-300), mass[:, 0] > 0


def judge(records: Sequence[Record], facts: Facts) -> dict[str, Any]:
    """The verdict on a run from the readings of its texts: `expected`, `passed` (None: not shown), `reason`, the
    faults that nine of ten such runs would have found (`detectable`), `details` and `notes`."""
    every: list[Any] = [record.verdict for record in finished(records) if record.verdict is not None]
    readings = [reading for reading in every if "tokens" in reading]
    detectable = None
    details: dict[str, Any] = {"texts": len(readings), "tokens": sum(reading["tokens"] for reading in readings)}
    details |= {name: _pooled(readings, name) for name in ("p", "q")}
    notes = [OTHER_Q] if details["q"] and not details["q"]["within"] else []
    if not readings:
        passed, reason = None, next((reading["unread"] for reading in every), "no text was read again")
    elif facts.greedy:
        passed, reason = _judge_equality(records, readings, details, facts.batch_invariant)
    else:
        sums = np.sum([reading["sums"] for reading in readings], axis=0)
        detectable = sequential.found_by(sums)
        passed, reason = _judge_draws(readings, sums, detectable, details)
    failed = [reading["unread"] for reading in every if reading.get("error")]
    if passed and not sum(reading["tested"] for reading in readings):
        passed, reason = None, "no guess was tested, only plain steps were made"
    elif passed and failed:
        passed, reason = None, f"a text could not be read again: {failed[0]}"
    if not facts.expected_lossless:
        passed, reason = None, facts.lossy_reason or reason
    # What no setting explains, also not one that is lossy by choice.
    if details["p"] and not details["p"]["within"]:
        passed, reason = False, "the decoder's p is not that of the stock module under the configuration's settings"
    elif ended := sum(not reading["ended"] for reading in readings):
        passed, reason = False, f"{ended} texts do not end at the first stop or at their limit"
    verdict = {"expected": facts.expected_lossless, "passed": passed, "reason": reason, "detectable": detectable}
    return verdict | {"details": details, "notes": notes}


def _pooled(readings: Readings, name: str) -> dict[str, Any] | None:
    """The comparison of one model's distributions over all texts, "tv" and "limit" as means; None if none was kept."""
    own = [reading[name] for reading in readings if reading.get(name, {}).get("positions")]
    if not own:
        return None
    found = {key: sum(part[key] for part in own) for key in own[0]}
    found["within"] = not found["beyond"] and not found.get("tv", 0.0) > MEAN_SHARE * found.get("limit", 0.0)
    means = {key: found[key] / found["positions"] for key in ("tv", "limit") if key in found}
    return found | {key: mean if math.isfinite(mean) else None for key, mean in means.items()}


def _judge_equality(records: Sequence[Record], readings: Readings, details: dict[str, Any], invariant: bool) -> Passed:
    """The verdict at temperature 0. With an `invariant` p every text must be plain decoding's, ties included."""
    different = [r for r in records if r.speculative and r.baseline and r.speculative.ids != r.baseline.ids]
    kinds = [(record.verdict or {}).get("divergence") or "unknown" for record in different]
    wrong = sum(reading["wrong"] for reading in readings)
    details |= {"wrong": wrong, "ties_of_tokens": sum(reading["ties"] for reading in readings)}
    details |= {"differ": len(kinds), "ties": kinds.count("tie")}
    if wrong:
        return False, f"{wrong} tokens do not have the largest logit of the stock module"
    if kinds and (invariant or "bug" in kinds):
        return False, f"{len(kinds) if invariant else kinds.count('bug')} outputs differ from plain decoding's"
    if "unknown" in kinds:
        return None, f"{kinds.count('unknown')} outputs differ from plain decoding's where they were not read again"
    return True, ""


def _judge_draws(readings: Readings, sums: Floats, detectable: Sequence[str], details: dict[str, Any]) -> Passed:
    """The verdict above temperature 0. Its statistic bounds the probability that an exact run gives such evidence."""
    statistic, fault = sequential.p_value(sums)
    impossible = sum(reading["impossible"] for reading in readings)
    details |= {"p_value": statistic, "level": sequential.LEVEL, "impossible": impossible}
    if impossible:
        return False, f"{impossible} draws have probability 0"
    if statistic < sequential.LEVEL:
        return False, f"what was drawn is far likelier under another distribution: {fault}"
    # Of verifiers whose acceptance follows from more than p and q of the guess, only the tokens are looked at.
    by_rule = any(reading["rule"] for reading in readings)
    least = sequential.EVERY if by_rule else sequential.FAVOURED
    same = by_rule and sums[least, 1] <= HARMLESS * sum(reading["tested"] for reading in readings)
    if sequential.ALTERNATIVES[least].name not in detectable and not same:
        return None, "too little was drawn: a verifier that accepts every guess would not have been found"
    return True, ""
