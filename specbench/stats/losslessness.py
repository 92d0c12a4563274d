"""The losslessness verdict of every run: whether the output distribution is the target's.

Every finished text is compared with the p of the stock module (`run/reference_scores.py`). Temperature 0: every token
must have the largest logit, up to rounding. At any: the decoder's p, before an argmax, must be this p up to rounding.
Above 0: no fault may explain far better what was drawn (`stats/test_statistics.py`). Beside it stands whether alpha is
the drafter's own: whether its q is that of the stock module (`run/drafter_reading.py`)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from specbench.stats.estimates import AlphaOwn, DecoderTV, Detectable, Floats, Lossless, Reread
from specbench.stats.records import Result, RunRecord
from specbench.stats.test_statistics import EVERY, VERDICT_LEVEL, found_lenience, found_tv, no_sums, p_value_of_sums
from specbench.stats.verdict_records import DEVIATIONS, ReferenceScore

LEAST_VARIANCE = 1.0  # of log p, nats^2: below it the target leaves nothing to chance that could be tested
MOST_TV = 0.5  # of verifiers whose guesses are not looked at: if only more would have been found, nothing was shown
HARMLESS = 1e-3  # total variation of accepting every guess: below it the drafter is the target
MEAN_SHARE = 0.25  # of what rounding explains at most, the mean may reach this
QUANTILES = (0.5, 0.9, 0.99, 1.0)
DETECTABLE = {"tested": "favoured", "recovered": "recovered", "bonus": "untested", "guesses": "guess"}


@dataclass(frozen=True)
class TestOutcome:
    """What a test found: "passed", "failed", "untested" or "inconclusive", and why if not passed. A `fault` fails a run
    that is not lossless by choice, too."""

    verdict: str
    reason: str = ""
    statistic: float = 0.0
    threshold: float = 0.0
    fault: bool = False


def judge(record: RunRecord, expected: bool, greedy: bool) -> Lossless:
    """The verdict on a run's texts, `expected` to be lossless or not."""
    readings = [result.reading for result in record.results if result.reading is not None]
    reread = Reread(len(readings), sum(r.tokens for r in readings), sum(r.seconds for r in readings))
    tv, detectable = decoder_tv(readings), Detectable(None)
    detail: dict[str, Any] = {"tokens": reread.tokens}
    detail |= {"of_tokens": sum(len(result.speculative.tokens) for result in record.results)}
    if not readings:
        found = TestOutcome("untested", record.unread or "no text was read again")
    elif greedy:
        found = equality(record.results, detail)
    else:
        sums = sum((reading.sums for reading in readings), no_sums())
        detectable = detectable_by(sums)
        found = martingale(readings, sums, detectable, detail)
    if fault := _faults(readings, tv):
        found = fault
        detail.pop("by_chance", None)
    if found.verdict == "passed" and not sum(reading.tested for reading in readings):
        found = replace(found, verdict="untested", reason="no guess was tested, only plain steps were made")
    elif found.verdict == "passed" and record.unreadable:
        found = replace(found, verdict="inconclusive", reason=f"a text could not be read again ({record.unread})")
    return Lossless(
        alpha_own=alpha_own(readings),
        expected=expected,
        passed={"passed": True, "failed": False}.get(found.verdict),
        verdict=found.verdict if expected or found.fault or found.verdict == "untested" else "lossy",
        reason=found.reason,
        method="top_1" if greedy else "martingale",
        statistic=found.statistic,
        threshold=found.threshold,
        detail=detail,
        decoder_tv=tv,
        detectable=detectable,
        reread=reread,
    )


def _faults(readings: Sequence[ReferenceScore], tv: DecoderTV | None) -> TestOutcome | None:
    """What no setting explains: numbers that are not finite, a decoder with another p, texts that end elsewhere."""
    if not all(reading.finite for reading in readings):
        reason = "a probability of the target or the drafter is not finite"
        return TestOutcome("failed", reason, math.inf, fault=True)
    if tv is not None and not tv.within:
        return TestOutcome("failed", "the decoder's p is not that of the stock module", 0.0, VERDICT_LEVEL, fault=True)
    if ended := sum(not reading.ended for reading in readings):
        return TestOutcome("failed", f"{ended} texts do not end at the first stop or at their limit", ended, fault=True)
    return None


def decoder_tv(readings: Sequence[ReferenceScore], prefix: str = "") -> DecoderTV | None:
    """The decoder's p against the stock module's, where it was kept; None if it was kept nowhere. With the prefix "q_"
    the same of the drafter's q."""
    tv, most = (np.concatenate([getattr(r, prefix + name) for r in readings] or [[]]) for name in ("tv", "rounding"))
    if not len(tv):
        return None
    limits = float(MEAN_SHARE * most.mean()), float(most.max())
    within = bool((tv <= most).all() and tv.mean() <= limits[0])  # false if one is not finite
    shares = np.divide(tv, most, out=np.where(tv == 0, 0.0, np.inf), where=most > 0)
    shares = np.quantile(shares, QUANTILES, method="higher")
    quantiles: dict[str, float | None] = {
        f"{share:g}": float(found) for share, found in zip(QUANTILES, shares, strict=True)
    }
    return DecoderTV(float(tv.mean()), float(tv.max()), *limits, len(tv), within, quantiles)


def alpha_own(readings: Sequence[ReferenceScore]) -> AlphaOwn:
    """Whether the q of tested guesses is the drafter's own."""
    tv = decoder_tv(readings, "q_")
    if tv is None:
        return AlphaOwn(None, next((r.q_unread for r in readings if r.q_unread), ""))
    reason = "" if tv.within else "the drafter's q in decoding is not the one that it has of the same text"
    return AlphaOwn(tv.within, reason, tv.mean, tv.largest, tv.largest_limit, tv.positions, tv.mean_limit)


def martingale(
    readings: Sequence[ReferenceScore], sums: Floats, detectable: Detectable, detail: dict[str, Any]
) -> TestOutcome:
    """The test above temperature 0, from the sums [K, SUMS] of all texts. Its statistic is a bound on the probability
    that an exact run gives so much evidence for faults."""
    statistic, fault = p_value_of_sums(sums)
    leak, guesses = sums[EVERY, -2:]
    deviations = sum((reading.deviations for reading in readings), np.zeros((len(DEVIATIONS), 2)))
    tested, impossible = (sum(getattr(reading, name) for reading in readings) for name in ("tested", "impossible"))
    detail |= {f"z_{name}": z(*found) for name, found in zip(DEVIATIONS, deviations.tolist(), strict=True)}
    detail |= {"tested": tested, "impossible": impossible}
    verdict, reason = "passed", ""
    if impossible:
        verdict, reason = "failed", f"{impossible} draws have probability 0"
    elif statistic < VERDICT_LEVEL:
        verdict, reason = "failed", f"what was drawn is far likelier under another law: {fault}"
        detail |= {"by_chance": statistic}
    elif deviations[0, 1] < LEAST_VARIANCE:
        verdict, reason = "inconclusive", "the target's distributions leave too little to chance"
    elif guesses:  # it is known which should stand
        if detectable.lenience is None and leak > HARMLESS * guesses:
            verdict, reason = "inconclusive", "even a verifier that accepts every guess would not have been found"
    elif (detectable.by_kind["tested"] or 0.0) > MOST_TV:
        verdict, reason = "inconclusive", f"{tested} tested guesses are too few to show anything"
    return TestOutcome(verdict, reason, statistic, VERDICT_LEVEL)


def detectable_by(sums: Floats) -> Detectable:
    """What a run with these sums [K, SUMS] would have found."""
    return Detectable(found_lenience(sums), {name: found_tv(kind, sums) for name, kind in DETECTABLE.items()})


def z(deviation: float, variance: float) -> float:
    """A sum in standard deviations; 0 if both are 0."""
    return deviation / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, deviation) if deviation else 0.0


def equality(results: Sequence[Result], detail: dict[str, Any]) -> TestOutcome:
    """The test at temperature 0: every token has the largest logit of the stock module, and the text is plain
    decoding's. A difference is a tie if rounding explains it."""
    readings = [result.reading for result in results if result.reading is not None]
    right = [reading.short <= reading.tolerance for reading in readings]  # false if one is not a number
    wrong = sum(int((~own).sum()) for own in right)
    ties = sum(int((own & (reading.short > 0)).sum()) for own, reading in zip(right, readings, strict=True))
    divergences = [
        _divergence(index, result)
        for index, result in enumerate(results)
        if list(result.speculative.tokens) != list(result.baseline.tokens)
    ]
    kinds = [found["kind"] for found in divergences]
    bugs, unknown = kinds.count("bug"), kinds.count("unknown")
    detail |= {"requests": len(results), "equal": len(results) - len(divergences), "wrong": wrong}
    detail |= {"ties": kinds.count("tie"), "ties_of_tokens": ties, "divergences": divergences[:20]}
    detail |= {"largest_tie": max((found["short"] for found in divergences if found["kind"] == "tie"), default=None)}
    if wrong:
        reason = f"{wrong} tokens do not have the largest logit of the stock module"
        return TestOutcome("failed", reason, float(wrong + bugs))
    if bugs:
        return TestOutcome("failed", f"{bugs} outputs differ from plain decoding's", float(bugs))
    if unknown:
        reason = f"{unknown} outputs differ from plain decoding's where they were not read again"
        return TestOutcome("inconclusive", reason)
    return TestOutcome("passed")


def _divergence(index: int, result: Result) -> dict[str, Any]:
    """Where the two texts of a request differ first, and whether rounding alone explains it ("tie"): both tokens must
    be as good as the best."""
    ours, plain = (list(decoded.tokens) for decoded in result.both)
    place, reading = first_difference(ours, plain), result.reading
    found: dict[str, Any] = {"request": index, "position": place, "kind": "unknown"}
    if reading is None or (place >= reading.tokens and place < len(ours)):
        return found
    if reading.plain_short is None:  # one of them has ended, with the same tokens
        return found | {"kind": "bug"}
    tolerance = float(reading.tolerance[place])
    short = max(float(reading.short[place]), reading.plain_short)
    kind = "tie" if short <= tolerance else "bug"
    return found | {"gap": float(reading.gap[place]), "short": short, "tolerance": tolerance, "kind": kind}


def first_difference(ours: Sequence[int], plain: Sequence[int]) -> int:
    """The first position where two texts differ: if one begins with the other, its length."""
    places = (i for i, (x, y) in enumerate(zip(ours, plain, strict=False)) if x != y)
    return next(places, min(len(ours), len(plain)))
