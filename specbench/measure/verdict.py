"""The losslessness verdict of every run: whether the output distribution is the target's.

Each finished text is read once more by the stock modules. (a) The decoder's p, and the drafter's q, must be theirs up
to rounding. (b) At temperature 0 every token must have the largest logit, and the text must be plain decoding's, up to
ties. (c) Above temperature 0 no fault may explain far better what was drawn (`measure/sequential.py`).

n new tokens of a text, V vocabulary, K tested guesses.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from specbench.measure import sequential
from specbench.measure.intervals import Floats
from specbench.measure.record import Facts, Record
from specbench.measure.recorder import Draws
from specbench.measure.rounds import finished
from specbench.measure.sequential import MARGIN, SURE, of_events, of_tokens, residual
from specbench.measure.stock import distance, readable, stock_scores, tie

MEAN_SHARE = 0.25  # of what rounding explains at most, the mean total variation may reach this
MOST_TV = 0.5  # if only larger faults would have been found, nothing was shown
HARMLESS = 1e-3  # total variation of accepting every guess: below it the drafter is the target
DETECTABLE = {"tested": "favoured", "recovered": "recovered", "bonus": "bonus", "guesses": "guess"}


def unread(reason: str, error: bool = False) -> dict[str, Any]:
    """The reading of a text that was not read; with an `error` the run's verdict is not "passed"."""
    return {"unread": reason, "error": error}


def read_text(
    target: Any,
    drafter: Any,
    prompt: Sequence[int],
    ids: Sequence[int],
    plain: Sequence[int],
    draws: Draws,
    encoder_input: Sequence[int] | None = None,
    ended: bool = True,
) -> dict[str, Any]:
    """What goes to `Record.verdict`: the new tokens `ids` after a prompt under the stock modules of target and drafter,
    beside `plain` decoding's. `ended` says that the text ends at the first stop or at its limit."""
    try:
        text = readable(prompt, ids, target.device)
        tokens, sampling = text[0, len(prompt) :], target.sampling
        logits = stock_scores(target, text, len(prompt), encoder_input)
        finite = bool(logits.amax(-1).isfinite().all() and np.isfinite([*draws.p, *draws.q]).all())
        found: dict[str, Any] = {"tokens": len(tokens), "ended": ended, "finite": finite, "tested": len(draws.at)}
        found["p"] = compared(logits, draws.target, target.dtype, sampling)
        own = _read_drafter(found, target, drafter, text, len(prompt), draws, encoder_input)
        if sampling.greedy:
            found |= _equality(logits, ids, tie(logits, target.dtype, sampling), plain)
        else:
            sums, found["impossible"] = draw_sums(draws, tokens, own)
            found["sums"] = sums.tolist()
    except (MemoryError, RuntimeError) as error:  # the run goes on
        return unread(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}", error=True)
    return found


def compared(logits: Tensor, kept: Sequence[tuple[int, Tensor]], dtype: torch.dtype, sampling: Any) -> dict[str, Any]:
    """Of the positions whose distribution was kept: the sums and the largest of the total variation from the stock
    module's, by its logits [n, V], and of what rounding explains; and how many go beyond that."""
    sums = {"positions": 0, "tv": 0.0, "limit": 0.0, "largest": 0.0, "largest_limit": 0.0, "beyond": 0}
    for begin, decoder in kept:
        stock = logits[begin : begin + len(decoder)]
        if not len(stock):
            continue
        tv, limit = distance(stock, decoder[: len(stock)], dtype, sampling)
        sums["positions"] += len(tv)
        sums["tv"], sums["limit"] = sums["tv"] + float(tv.sum()), sums["limit"] + float(limit.sum())
        sums["largest"] = max(sums["largest"], float(tv.max()))
        sums["largest_limit"] = max(sums["largest_limit"], float(limit.max()))
        sums["beyond"] += int((~(tv <= limit)).sum())  # also where it is not finite
    return sums


def _read_drafter(
    found: dict[str, Any], target: Any, drafter: Any, text: Tensor, begin: int, draws: Draws, encoder_input: Any
) -> Tensor | None:
    """Adds how far q is from that of the drafter's stock module, or why that is not known; at temperature 0 how many
    guesses are not its likeliest token. Returns its q [n, V] of text [1, T] above temperature 0."""
    found["q_unread"] = why_not(drafter, target)
    text = text[:, : drafter.context]
    if found["q_unread"] or text.shape[1] <= begin:
        return None
    model = drafter.models[0]
    logits = stock_scores(model, text, begin, encoder_input)
    if not model.sampling.greedy:
        found["q"] = compared(logits, draws.drafter, model.dtype, model.sampling)
        own: Tensor = (logits.double() / model.sampling.temperature).softmax(-1)
        return own
    known = [k for k, at in enumerate(draws.at) if at < len(logits)]
    guesses = torch.tensor([draws.guess[k] for k in known], dtype=torch.long, device=logits.device)
    here = logits[[draws.at[k] for k in known]]
    short = here.amax(-1).double() - here.gather(1, guesses[:, None])[:, 0].double()
    wrong = int((~(short <= tie(here, model.dtype, model.sampling))).sum())
    found["q"] = {"positions": len(known), "beyond": wrong}
    return None


def why_not(drafter: Any, target: Any) -> str:
    """Why q cannot be read again; empty if it can."""
    if not drafter.reads_text:
        return "what this drafter says depends on more than the text"
    if len(drafter.models) != 1:
        return "several models draft" if drafter.models else "it has no model"
    if not target.sampling.greedy:
        return "its guesses are the likeliest tokens, without q" if drafter.only_likeliest else ""
    greedy = drafter.models[0].sampling.greedy and not drafter.trees
    return "" if greedy else "at temperature 0 it reads chains of likeliest guesses only"


def _equality(logits: Tensor, ids: Sequence[int], slack: Tensor, plain: Sequence[int]) -> dict[str, Any]:
    """At temperature 0, from logits [n, V] and how far rounding may move them [n]: how many of the tokens `ids` do not
    have the largest logit, how many are ties, and what the first difference from plain decoding's text is: none (""),
    a "tie", a "bug", or "unknown" where it was not read."""
    n, best = len(logits), logits.amax(-1).double()
    tokens = torch.tensor(ids[:n], device=logits.device)
    short = best - logits.gather(-1, tokens[:, None])[:, 0].double()
    right = short <= slack  # false if one is not a number
    found = {"wrong": int((~right).sum()), "ties": int((right & (short > 0)).sum()), "divergence": ""}
    place = next((i for i, (x, y) in enumerate(zip(ids, plain, strict=False)) if x != y), min(len(ids), len(plain)))
    if place == len(ids) == len(plain):
        return found
    if place == min(len(ids), len(plain)):  # one of them has ended, with the same tokens
        return found | {"divergence": "bug"}
    if place >= n:
        return found | {"divergence": "unknown"}
    worse = max(float(short[place]), float(best[place] - logits[place, plain[place]]))
    return found | {"divergence": "tie" if worse <= float(slack[place]) else "bug"}


def draw_sums(draws: Draws, tokens: Tensor, own: Tensor | None = None) -> tuple[Floats, int]:
    """The sums of the sequential test over one text, and how many draws have probability 0: from its tokens [n] and the
    stock module's q [m, V] of their first m positions, if it was read."""
    n, device = len(tokens), tokens.device
    known = [k for k, at in enumerate(draws.at) if at < n]
    at = [draws.at[k] for k in known]
    guess, tested = torch.zeros_like(tokens), torch.zeros(n, dtype=torch.bool, device=device)
    guess[at] = torch.tensor([draws.guess[k] for k in known], dtype=torch.long, device=device)
    tested[at] = True
    stands = tested & (tokens == guess)
    sums, impossible = _acceptance(draws, known, stands[at].cpu())
    p, has_p = _rows(draws.target, n, device)
    if p is None:
        return sums, impossible
    q, drafted = _rows(draws.drafter, n, device, p.shape[-1])
    assert q is not None
    point = torch.zeros_like(drafted)
    point[[position for position, k in zip(at, known, strict=True) if draws.q[k] == 1]] = True
    point &= ~drafted
    q[point] = F.one_hot(guess[point], p.shape[-1]).to(q.dtype)
    every = torch.arange(p.shape[-1], device=device)
    free, both = has_p & ~tested, has_p & (drafted | point) & tested
    favoured = q[both] > MARGIN * p[both]
    likely = (p[both] * favoured).sum(-1).clamp(max=1)
    sums = sums + of_events("favoured", likely, favoured.gather(1, tokens[both, None])[:, 0])
    sums = sums + of_tokens("bonus", p[free], tokens[free])
    sums = sums + of_tokens("bonus ids", p[free], tokens[free], every.expand_as(p)[free])
    behind = free.clone()  # a bonus token stands behind a guess
    behind[1:] &= both[:-1]
    behind[:1] = False
    sums = sums + of_tokens("behind", p[behind], tokens[behind], torch.roll(q, 1, 0)[behind])
    if own is not None:
        read = free[: len(own)]
        sums = sums + of_tokens("own", p[: len(own)][read], tokens[: len(own)][read], own[read])
    sums = sums + of_tokens("guess", q[drafted & tested], guess[drafted & tested])
    impossible += _zero(p[has_p], tokens[has_p]) + _zero(q[drafted & tested], guess[drafted & tested])
    if draws.rule is not None:
        lost = both & ~stands
        without = F.one_hot(guess[lost], p.shape[-1]).to(q.dtype) if draws.rule == "p" else q[lost]
        rest, drawn = residual(p[lost], without), tokens[lost]
        sums = sums + of_tokens("recovered", rest, drawn) + of_tokens("after", rest, drawn, q[lost])
        sums = sums + of_tokens("recovered ids", rest, drawn, every.expand_as(rest))
        impossible += _zero(rest, drawn)
    return sums, impossible


def _acceptance(draws: Draws, known: Sequence[int], stands: Tensor) -> tuple[Floats, int]:
    """The sums of whether guesses stand [K], whose probability follows from the decoder's own p and q."""
    if draws.rule is None or not known:
        return sequential.no_sums(), 0
    p, q = (torch.tensor([values[k] for k in known], dtype=torch.double) for values in (draws.p, draws.q))
    ratio = torch.where(q > 0, p / q, 1.0) if draws.rule == "p / q" else p
    mean, least = ratio.clamp(max=1), list[float]()
    for k, before in zip(known, [1.0, *mean.tolist()], strict=False):
        least.append(1.0 if draws.first[k] else min(least[-1], before))
    last = torch.tensor([draws.last[k] for k in known])
    wrong = (q == 0) | ((mean == 0) & stands) | ((ratio > SURE) & ~stands)
    more = torch.tensor(least, dtype=torch.double), last
    return of_events("accepted", mean, stands, *more), int(wrong.sum())


def _zero(p: Tensor, drawn: Tensor) -> int:
    """How many of the tokens drawn [k] have probability 0 by p [k, V]."""
    return int((p.gather(1, drawn[:, None]) == 0).sum())


def _rows(
    kept: Sequence[tuple[int, Tensor]], n: int, device: torch.device, vocab_size: int = 0
) -> tuple[Tensor | None, Tensor]:
    """The distributions of the first n positions [n, V] in float64, 0 where they were not kept, and where they were
    [n]; None if there are none and V is not known."""
    has = torch.zeros(n, dtype=torch.bool, device=device)
    width = kept[0][1].shape[-1] if kept else vocab_size
    if not width:
        return None, has
    found = torch.zeros(n, width, dtype=torch.double, device=device)
    for begin, rows in kept:
        end = min(begin + len(rows), n)
        if begin < end:
            own = rows[: end - begin].double()
            found[begin:end], has[begin:end] = own / own.sum(-1, keepdim=True).clamp(min=1e-300), True
    return found, has


def judge(records: Sequence[Record], facts: Facts) -> dict[str, Any]:
    """The verdict on a run from the readings of its texts: `expected`, `passed` (None: not shown), `reason`, what nine
    of ten such runs would have found (`detectable`), `details` and `notes`."""
    every = [record.verdict for record in finished(records) if record.verdict is not None]
    readings = [reading for reading in every if "tokens" in reading]
    detectable: dict[str, Any] = {"lenience": None, "tv": {}}
    details: dict[str, Any] = {"texts": len(readings), "tokens": sum(reading["tokens"] for reading in readings)}
    details |= {name: _pooled(readings, name) for name in ("p", "q")}
    details["q_unread"] = next((reading["q_unread"] for reading in readings if reading["q_unread"]), "")
    fault = _fault(readings, details)
    if not readings:
        passed, reason = None, next((reading["unread"] for reading in every), "no text was read again")
    elif facts.greedy:
        passed, reason = _judge_equality(records, readings, details)
    else:
        sums = sum((np.array(reading["sums"]) for reading in readings), sequential.no_sums())
        detectable = {
            "lenience": sequential.found_lenience(sums),
            "tv": {name: sequential.found_tv(kind, sums) for name, kind in DETECTABLE.items()},
        }
        passed, reason = _judge_draws(readings, sums, detectable, details)
    if passed and not sum(reading["tested"] for reading in readings):
        passed, reason = None, "no guess was tested, only plain steps were made"
    elif passed and any(reading.get("error") for reading in every):
        passed, reason = None, "a text could not be read again: " + next(r["unread"] for r in every if r.get("error"))
    if not facts.expected_lossless:
        passed, reason = None, facts.lossy_reason or reason
    if fault:
        passed, reason = False, fault
    return {"expected": facts.expected_lossless, "passed": passed, "reason": reason, "detectable": detectable,
            "details": details, "notes": _notes(details)}  # fmt: skip


def _fault(readings: Sequence[dict[str, Any]], details: dict[str, Any]) -> str:
    """What no setting explains, in words; empty if there is nothing."""
    if not all(reading["finite"] for reading in readings):
        return "a probability of the target or the drafter is not finite"
    if details["p"] and not details["p"]["within"]:
        return "the decoder's p is not that of the stock module"
    ended = sum(not reading["ended"] for reading in readings)
    return f"{ended} texts do not end at the first stop or at their limit" if ended else ""


def _pooled(readings: Sequence[dict[str, Any]], name: str) -> dict[str, Any] | None:
    """The comparison of one model's distributions over all texts; None if none was kept."""
    own = [reading[name] for reading in readings if reading.get(name, {}).get("positions")]
    if not own:
        return None
    found = {key: (max if key.startswith("largest") else sum)(part[key] for part in own) for key in own[0]}
    n = found["positions"]
    mean = found["tv"] <= MEAN_SHARE * found["limit"] if "tv" in found else True
    means = {key: found.pop(key) / n for key in ("tv", "limit") if key in found}
    return found | means | {"within": not found["beyond"] and mean}


def _notes(details: dict[str, Any]) -> list[str]:
    if details["q"] and not details["q"]["within"]:
        return ["the drafter's q in decoding is not its stock module's: alpha is not that drafter's own"]
    return []


def _judge_equality(
    records: Sequence[Record], readings: Sequence[dict[str, Any]], details: dict[str, Any]
) -> tuple[bool | None, str]:
    """The verdict at temperature 0."""
    kinds = []
    for record in finished(records):
        assert record.speculative is not None and record.baseline is not None
        if record.speculative.ids != record.baseline.ids:
            kinds.append((record.verdict or {}).get("divergence") or "unknown")
    wrong = sum(reading["wrong"] for reading in readings)
    details |= {"wrong": wrong, "ties_of_tokens": sum(reading["ties"] for reading in readings)}
    details |= {"differ": len(kinds), "ties": kinds.count("tie")}
    if wrong:
        return False, f"{wrong} tokens do not have the largest logit of the stock module"
    if bugs := kinds.count("bug"):
        return False, f"{bugs} outputs differ from plain decoding's"
    if unknown := kinds.count("unknown"):
        return None, f"{unknown} outputs differ from plain decoding's where they were not read again"
    return True, ""


def _judge_draws(
    readings: Sequence[dict[str, Any]], sums: Floats, detectable: dict[str, Any], details: dict[str, Any]
) -> tuple[bool | None, str]:
    """The verdict above temperature 0. Its statistic bounds the probability that an exact run gives such evidence."""
    statistic, fault = sequential.p_value(sums)
    impossible = sum(reading["impossible"] for reading in readings)
    details |= {"p_value": statistic, "level": sequential.LEVEL, "impossible": impossible}
    if impossible:
        return False, f"{impossible} draws have probability 0"
    if statistic < sequential.LEVEL:
        return False, f"what was drawn is far likelier under another distribution: {fault}"
    *_, leak, guesses = sums[sequential.EVERY]
    if guesses and detectable["lenience"] is None and leak > HARMLESS * guesses:
        return None, "even a verifier that accepts every guess would not have been found"
    tested = detectable["tv"]["tested"]
    if not guesses and not (tested is not None and math.isfinite(tested) and tested <= MOST_TV):
        return None, "too little was drawn to show anything"
    return True, ""
