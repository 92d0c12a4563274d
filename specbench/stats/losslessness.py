"""The losslessness verdict of every run: whether the output distribution is the target's.

Every finished text is compared with the p of the stock module (`run/reference_scores.py`). Temperature 0: every token
must have the largest logit, up to rounding. Above: the decoder's p must be this p up to rounding, and three sums must
be as small as they are if tokens are drawn from it (`stats/test_statistics.py`)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from specbench.decoding import processes
from specbench.stats.estimates import DecoderTV, Detectable, Lossless, Reread
from specbench.stats.records import Result, RunRecord
from specbench.stats.test_statistics import TESTS, VERDICT_LEVEL, Statistics
from specbench.stats.verdict_records import ReferenceScore

LEAST_VARIANCE = 1.0  # of log p, nats^2: below it the target leaves nothing to chance that could be tested
MOST_TV = 0.5  # if only a total variation above this would have been found, nothing was shown
MEAN_SHARE = 0.25  # of what rounding explains at most, the mean may reach this


@dataclass(frozen=True)
class TestOutcome:
    """What one test found: "passed", "failed", "untested" or "inconclusive", and why if not passed. A `fault` fails a
    run that is not lossless by choice, too."""

    verdict: str
    reason: str = ""
    statistic: float = 0.0
    threshold: float = 0.0
    fault: bool = False


def judge(record: RunRecord, expected: bool, greedy: bool) -> Lossless:
    """The verdict on a run's texts, `expected` to be lossless or not."""
    readings = [result.reading for result in record.results if result.reading is not None]
    reread = Reread(len(readings), sum(r.tokens for r in readings), sum(r.seconds for r in readings))
    tv, detectable = decoder_tv(readings), Detectable(None, None)
    detail: dict[str, Any] = {"tokens": reread.tokens}
    if processes.current.size > 1:
        detail["p"] = f"of the target as {processes.current.size} processes compute it, not of the whole model"
    faults = _faults(readings, tv)
    if not readings:
        finding = TestOutcome("untested", record.unread or "no text was read again")
    elif greedy:
        finding = equality(record.results, detail)
    else:
        statistics = Statistics.of(readings)
        detectable = Detectable(statistics.detectable_tv(), statistics.detectable_lenience())
        detail |= {f"z_{name}": value for name, value in statistics.z().items()}
        detail |= {"tested": len(statistics.leak), "impossible": sum(len(r.impossible) for r in readings)}
        finding = martingale(statistics, detectable, detail)
    finding = faults or _restricted(finding, record, readings)
    lossy = not expected and not finding.fault and finding.verdict != "untested"
    return Lossless(
        expected=expected,
        passed={"passed": True, "failed": False}.get(finding.verdict),
        verdict="lossy" if lossy else finding.verdict,
        reason=finding.reason,
        method="top_1" if greedy else "martingale",
        statistic=finding.statistic,
        threshold=finding.threshold,
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


def _restricted(finding: TestOutcome, record: RunRecord, readings: Sequence[ReferenceScore]) -> TestOutcome:
    """The finding, unless it is "passed" and something was not tested."""
    if finding.verdict != "passed":
        return finding
    if not sum(reading.tested for reading in readings):
        return replace(finding, verdict="untested", reason="no guess was tested, only plain steps were made")
    if record.unreadable:
        return replace(finding, verdict="inconclusive", reason=f"a text could not be read again ({record.unread})")
    return finding


def decoder_tv(readings: Sequence[ReferenceScore]) -> DecoderTV | None:
    """The decoder's p against the stock module's, where it was kept; None if it was kept nowhere."""
    tv, rounding = (np.concatenate([getattr(r, name) for r in readings] or [[]]) for name in ("tv", "rounding"))
    if not len(tv):
        return None
    limits = float(MEAN_SHARE * rounding.mean()), float(rounding.max())
    within = bool((tv <= rounding).all() and tv.mean() <= limits[0])  # false if one is not finite
    return DecoderTV(float(tv.mean()), float(tv.max()), *limits, len(tv), within)


def martingale(statistics: Statistics, detectable: Detectable, detail: dict[str, Any]) -> TestOutcome:
    """The test above temperature 0. Its statistic is a bound on the probability that one of an exact run's statistics
    deviates as much as the worst one does."""
    bounds = statistics.bounds()
    worst = min(bounds, key=lambda name: bounds[name])
    shown = min(1.0, TESTS * bounds[worst]), VERDICT_LEVEL
    if detail["impossible"]:
        return TestOutcome("failed", f"{detail['impossible']} tokens have probability 0", *shown)
    if TESTS * bounds[worst] < VERDICT_LEVEL:
        return TestOutcome("failed", f"the statistic {worst} deviates more than by chance", *shown)
    if statistics.log_p.variance < LEAST_VARIANCE:
        return TestOutcome("inconclusive", "the target's distributions leave too little to chance", *shown)
    if detectable.tv is not None and detectable.tv > MOST_TV:
        return TestOutcome(
            "inconclusive", f"{len(statistics.leak)} tested guesses are too few to show anything", *shown
        )
    return TestOutcome("passed", "", *shown)


def equality(results: Sequence[Result], detail: dict[str, Any]) -> TestOutcome:
    """The test at temperature 0: every token has the largest logit of the stock module, and the text is plain
    decoding's. A difference is a tie if rounding explains it."""
    wrong, ties, divergences = 0, 0, []
    for index, result in enumerate(results):
        reading = result.reading
        if reading is not None:
            right = reading.short <= reading.tolerance  # false if one is not a number
            wrong, ties = wrong + int((~right).sum()), ties + int((right & (reading.short > 0)).sum())
        if list(result.speculative.tokens) != list(result.baseline.tokens):
            divergences.append(_divergence(index, result))
    kinds = [found["kind"] for found in divergences]
    detail |= {"requests": len(results), "equal": len(results) - len(divergences), "wrong": wrong}
    detail |= {"ties": kinds.count("tie"), "ties_of_tokens": ties, "divergences": divergences[:20]}
    worst = float(wrong + kinds.count("bug"))
    if wrong:
        return TestOutcome("failed", f"{wrong} tokens do not have the largest logit of the stock module", worst)
    if worst:
        return TestOutcome("failed", f"{kinds.count('bug')} outputs differ from plain decoding's", worst)
    if unknown := kinds.count("unknown"):
        return TestOutcome(
            "inconclusive", f"{unknown} outputs differ from plain decoding's where they were not read again"
        )
    return TestOutcome("passed")


def _divergence(index: int, result: Result) -> dict[str, Any]:
    """Where the two texts of a request differ first, and whether rounding alone explains it ("tie"): both tokens must
    be as good as the best."""
    ours, plain = (list(decoded.tokens) for decoded in result.both)
    place = next((i for i, (x, y) in enumerate(zip(ours, plain, strict=False)) if x != y), min(len(ours), len(plain)))
    found: dict[str, Any] = {"request": index, "position": place, "kind": "unknown"}
    reading = result.reading
    if reading is None or (place >= reading.tokens and place < len(ours)):
        return found
    if reading.plain_short is None:  # one of them has ended, with the same tokens
        return found | {"kind": "bug"}
    tolerance = float(reading.tolerance[place])
    found |= {"gap": float(reading.gap[place]), "tolerance": tolerance}
    tie = max(float(reading.short[place]), reading.plain_short) <= tolerance
    return found | {"kind": "tie" if tie else "bug"}
