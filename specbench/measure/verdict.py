"""The losslessness verdict of every run: whether the output distribution is the target's.

Each finished text is read once more by the stock modules of transformers, whose distributions are made by its own
logits processors. The decoder's p and q must be theirs up to rounding. At temperature 0 every token must have the
largest logit, and the text must be plain decoding's, up to ties. Above it no fault may explain far better what was
drawn (`measure/sequential.py`).

n new tokens of a text, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from specbench.decoding.sampling import Sampling
from specbench.measure import sequential
from specbench.measure.record import Facts, Reading, Record
from specbench.measure.recorder import Draws
from specbench.measure.sequential import Kept, Readings
from specbench.measure.sums import finished
from specbench.models.reference_forward import FinishedText

MEAN_SHARE = 0.25  # of what rounding explains at most, the mean total variation may reach this
# How many roundings of the largest logit two correct forwards may differ by. In 16 bits sums are kept in float32, and
# results are rounded; in float32 the sums are rounded too.
ROUNDINGS = {torch.float16: 4.0, torch.bfloat16: 4.0}
ROUNDINGS_OF_SUMS = 64.0
TYPICAL_16_BIT = 0.25  # of these, for p in 16 bits: a tie must be forgiven surely, an error of p be found
UNDERFLOW = 1e-37  # probabilities below it may be 0 in float32


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
        found["p"] = compared(logits, draws.target, target.dtype, sampling)
        own = None
        if reads_q(drafter, target) and len(text.prompt) < drafter.context:
            own = text.scores(drafter.models[0], end=drafter.context)
            found["q"] = _drafter(own, draws, drafter.models[0])
        if sampling.greedy:
            return found | _equality(logits, text.ids, plain, target.dtype, sampling)
        tokens = torch.tensor(text.ids, dtype=torch.long, device=target.device)
        sums, impossible = sequential.draw_sums(draws, tokens, own, beside)
        return found | {"sums": sums.tolist(), "impossible": impossible}
    except (MemoryError, RuntimeError) as error:  # the run goes on
        return unread(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}", error=True)


def reads_q(drafter: Any, target: Any) -> bool:
    """Whether q can be read again: of a model whose q follows from the text; at temperature 0 of likeliest chains."""
    alone = drafter.reads_text and len(drafter.models) == 1 and not drafter.only_likeliest
    return alone and not (target.sampling.greedy and (drafter.trees or not drafter.models[0].sampling.greedy))


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
    """How far q is from the stock module's, by logits [n, V]; at temperature 0 how many guesses are not likeliest."""
    if not model.sampling.greedy:
        return compared(logits, draws.drafter, model.dtype, model.sampling)
    guesses = [guess for guess in draws.guesses if guess.at < len(logits)]
    read = logits[[guess.at for guess in guesses]]
    right = likeliest(read, [guess.token for guess in guesses], model.dtype, model.sampling)
    return {"positions": len(guesses), "beyond": int((~right).sum())}


def likeliest(logits: Tensor, tokens: Sequence[int], dtype: torch.dtype, sampling: Sampling) -> Tensor:
    """[n] bool: whether n tokens have the largest of logits [n, V], or one that is below it by rounding."""
    own = logits.gather(1, torch.tensor([*tokens], dtype=torch.long, device=logits.device)[:, None])[:, 0]
    return logits.amax(-1).double() - own.double() <= tie(logits, dtype, sampling)  # false if one is not a number


def _equality(
    logits: Tensor, ids: Sequence[int], plain: Sequence[int], dtype: torch.dtype, sampling: Sampling
) -> dict[str, Any]:
    """At temperature 0, from logits [n, V]: how many of the n tokens `ids` do not have the largest logit, and what the
    first difference from plain decoding's text is: none (""), a "tie" or a "bug"."""
    right = likeliest(logits, ids, dtype, sampling)
    place = next((i for i, (ours, other) in enumerate(zip(ids, plain, strict=False)) if ours != other), None)
    if place is None:
        kind = "" if len(ids) == len(plain) else "bug"  # one of them has ended, with the same tokens
    else:
        tied = right[place] and likeliest(logits[place, None], [plain[place]], dtype, sampling)
        kind = "tie" if tied else "bug"
    return {"wrong": int((~right).sum()), "divergence": kind}


def tolerance(logits: Tensor, dtype: torch.dtype, sampling: Sampling) -> Tensor:
    """[n]: how far two logits may move against each other by rounding, from logits [n, V]."""
    largest = torch.where(logits > -torch.inf, logits.abs(), 0.0).amax(-1).double()
    return ROUNDINGS.get(dtype, ROUNDINGS_OF_SUMS) * torch.finfo(dtype).eps * largest * _penalty(sampling)


def tie(logits: Tensor, dtype: torch.dtype, sampling: Sampling) -> Tensor:
    """[n]: how far below the largest of logits [n, V] a token's may be by rounding. In 16 bits it is counted in steps
    of the dtype at that logit itself, but one step at the largest absolute value is always forgiven."""
    most = tolerance(logits, dtype, sampling)
    if dtype not in ROUNDINGS:
        return most
    eps, best = torch.finfo(dtype).eps, logits.amax(-1).double() * _penalty(sampling)
    largest = most / ROUNDINGS[dtype] / eps
    step, one = (torch.ldexp(torch.full_like(x, eps / 2), torch.frexp(x).exponent) for x in (best, largest))
    return torch.maximum(ROUNDINGS[dtype] * step, one).minimum(most)


def _penalty(sampling: Sampling) -> float:
    """By how much the repetition penalty makes errors of logits grow."""
    return max(sampling.repetition_penalty, 1 / sampling.repetition_penalty)


def distance(logits: Tensor, decoder: Tensor, dtype: torch.dtype, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """[n]: the total variation between the decoder's distribution [n, V] and that of the stock module's penalised
    logits [n, V], and the largest that rounding explains: a move of all logits by at most d changes p by at most
    tanh d. Both are compared on the decoder's tokens; the total variation is 1 if rounding does not explain why these
    passed top-k and top-p. At temperature 0 the softmax before the argmax is compared."""
    if sampling.greedy:
        sampling = Sampling()
    slack = tolerance(logits, dtype, sampling) / sampling.temperature
    scores = warped(logits, Sampling(sampling.temperature))
    surely, possibly = passing(scores, slack[:, None], sampling)
    theirs = decoder > 0
    own = scores.masked_fill(~theirs, -torch.inf).softmax(-1)
    surely = surely & (scores.softmax(-1) > UNDERFLOW)
    explained = ~((surely & ~theirs) | (theirs & ~possibly)).any(-1)
    limit = ((TYPICAL_16_BIT if dtype in ROUNDINGS else 1.0) * slack).tanh()
    return torch.where(explained, (decoder.double() - own).abs().sum(-1) / 2, 1.0), limit


def passing(scores: Tensor, slack: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """[n, V] bool: which tokens pass top-k and top-p whatever rounding does, and which may pass, from scores [n, V]
    after the temperature that may move against each other by slack [n, 1]. A token passes surely if it stays likelier
    than all that are excluded from the smallest set, and may pass if it can reach the largest set."""
    possible, top_k = scores > -torch.inf, sampling.top_k
    truncation = replace(sampling, temperature=1.0)
    smallest, largest = (warped(scores, truncation, sign * slack.tanh()) > -torch.inf for sign in (-1, 1))
    best_excluded = scores.masked_fill(smallest, -torch.inf).amax(-1, keepdim=True)
    if 0 < top_k < scores.shape[-1]:  # of tokens that tie for the last place rounding may exclude any
        best_excluded = best_excluded.maximum(scores.topk(top_k + 1, -1).values[:, -1:])
    last_included = scores.masked_fill(~largest, torch.inf).amin(-1, keepdim=True)
    return possible & (scores > best_excluded + 2 * slack), possible & (scores >= last_included - 2 * slack)


def warped(logits: Tensor, sampling: Sampling, more_mass: Tensor | None = None) -> Tensor:
    """Scores [n, V] in float64 of penalised logits [n, V] after temperature, top-k and top-p, by transformers' own
    processors in the order of generate(); -inf where a token is excluded. `more_mass` [n, 1] is added to top-p."""
    scores, no_text = logits.double(), torch.empty(0, dtype=torch.long)
    if sampling.temperature != 1:
        scores = TemperatureLogitsWarper(float(sampling.temperature))(no_text, scores)
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(no_text, scores)
    if sampling.top_p < 1:
        top_p: Any = TopPLogitsWarper(sampling.top_p)
        if more_mass is not None:
            top_p.top_p = sampling.top_p + more_mass
        scores = top_p(no_text, scores)
    return scores


def judge(records: Sequence[Record], facts: Facts) -> dict[str, Any]:
    """The verdict on a run from the readings of its texts: `expected`, `passed` (None: not shown), `reason`, the
    faults that nine of ten such runs would have found (`detectable`), `details` and `notes`."""
    every: list[Any] = [record.verdict for record in finished(records) if record.verdict is not None]
    readings = [reading for reading in every if "tokens" in reading]
    details: dict[str, Any] = {"texts": len(readings), "tokens": sum(reading["tokens"] for reading in readings)}
    details |= {name: _pooled(readings, name) for name in ("p", "q")}
    notes, detectable = [], None
    if details["q"] and not details["q"]["within"]:
        notes = ["q in decoding is not the stock module's: alpha is not the drafter's own"]
    if not readings:
        passed, reason = None, next((reading["unread"] for reading in every), "no text was read again")
    elif facts.greedy:
        passed, reason = _judge_equality(records, readings, details, facts.batch_invariant)
    else:
        passed, reason, detectable = sequential.judge_draws(readings, details)
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


def _judge_equality(
    records: Sequence[Record], readings: Readings, details: dict[str, Any], invariant: bool
) -> tuple[bool | None, str]:
    """The verdict at temperature 0 and why; adds to the details. An `invariant` p excuses no tie."""
    different = [r for r in records if r.speculative and r.baseline and r.speculative.ids != r.baseline.ids]
    kinds = [(record.verdict or {}).get("divergence") or "unknown" for record in different]
    wrong = sum(reading["wrong"] for reading in readings)
    details |= {"wrong": wrong, "differ": len(kinds), "ties": kinds.count("tie")}
    if wrong:
        return False, f"{wrong} tokens do not have the largest logit of the stock module"
    if kinds and (invariant or "bug" in kinds):
        return False, f"{len(kinds) if invariant else kinds.count('bug')} outputs differ from plain decoding's"
    if "unknown" in kinds:
        return None, f"{kinds.count('unknown')} outputs differ from plain decoding's where they were not read again"
    return True, ""
