"""The losslessness verdict of every run: whether the output distribution is the target's.

Every finished text is read once more by the stock module (`measure/stock_reading.py`), and the verdict compares the
text with that p, not with the decoder's. Temperature 0: every token must have the largest logit, up to rounding. Above:
the decoder's p must be this p up to rounding, and three sums must be as small as they are if tokens are drawn from it
(`measure/martingale.py`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from specbench.decoded import Result
from specbench.measure.statistics import LEVEL, TESTS, Statistics
from specbench.reading import Reading
from specbench.results import DecoderTV, Detectable, Lossless, Reread

LEAST_VARIANCE = 1.0  # of log p, nats^2: below it the target leaves nothing to chance that could be tested
MOST_TV = 0.5  # if only a total variation above this would have been found, nothing was shown
MEAN_SHARE = 0.25  # of what rounding explains at most, the mean may reach this
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Finding:
    """What one test found: "passed", "failed", "untested" or "inconclusive", and why if not passed."""

    verdict: str
    reason: str = ""
    method: str = "martingale"
    statistic: float = 0.0
    threshold: float = 0.0


def judge(results: Sequence[Result], expected: bool, greedy: bool, unread: str) -> Lossless:
    """The verdict on a run's texts. `unread` says why texts were not read, if some were not."""
    readings = [result.reading for result in results if result.reading is not None and result.reading.tokens]
    reread = Reread(len(readings), sum(r.tokens for r in readings), sum(r.seconds for r in readings))
    tv, detectable = decoder_tv(readings), Detectable(None, None)
    detail: dict[str, Any] = {"tokens": reread.tokens}
    method = "top_1" if greedy else "martingale"
    if not readings:
        finding = Finding("untested", unread or "no text was read again", method)
    elif not all(reading.finite for reading in readings):
        finding = Finding("failed", "a probability of the target or the drafter is not finite", method, math.inf)
    elif greedy:
        finding = equality(results, detail)
    else:
        statistics = Statistics.of(readings)
        detectable = Detectable(statistics.detectable_tv(), statistics.detectable_lenience())
        detail |= {f"z_{name}": value for name, value in statistics.z().items()}
        detail |= {"tested": len(statistics.leak), "impossible": sum(len(r.impossible) for r in readings)}
        finding = martingale(statistics, tv, detectable, detail)
    verdict = finding.verdict
    if not expected and verdict != "untested" and not _is_fault(finding, tv):
        verdict = "lossy"
    passed = {"passed": True, "failed": False}.get(finding.verdict)
    return Lossless(
        expected=expected,
        passed=passed,
        verdict=verdict,
        reason=finding.reason,
        method=finding.method,
        statistic=finding.statistic,
        threshold=finding.threshold,
        detail=detail,
        decoder_tv=tv,
        detectable=detectable,
        reread=reread,
    )


def _is_fault(finding: Finding, tv: DecoderTV | None) -> bool:
    """Whether a run that is not expected to be lossless failed for a reason that no setting explains."""
    return not math.isfinite(finding.statistic) or (tv is not None and not tv.within)


def decoder_tv(readings: Sequence[Reading]) -> DecoderTV | None:
    """The decoder's p against the stock module's, where it was kept; None if it was kept nowhere."""
    tv, rounding = (np.concatenate([getattr(r, name) for r in readings] or [[]]) for name in ("tv", "rounding"))
    if not len(tv):
        return None
    limits = float(MEAN_SHARE * rounding.mean()), float(rounding.max())
    within = bool((tv <= rounding).all() and tv.mean() <= limits[0])  # false if one is not finite
    return DecoderTV(float(tv.mean()), float(tv.max()), *limits, len(tv), within)


def martingale(statistics: Statistics, tv: DecoderTV | None, detectable: Detectable, detail: dict[str, Any]) -> Finding:
    """The test above temperature 0. Its statistic is a bound: the probability that one of an exact run's statistics
    deviates as much as the worst one does."""
    bounds = statistics.bounds()
    worst = min(bounds, key=lambda name: bounds[name])
    shown = "martingale", min(1.0, TESTS * bounds[worst]), LEVEL
    if detail["impossible"]:
        return Finding("failed", f"{detail['impossible']} tokens have probability 0", *shown)
    if tv is not None and not tv.within:
        return Finding("failed", "the decoder's p is not that of the stock module", *shown)
    if TESTS * bounds[worst] < LEVEL:
        return Finding("failed", f"the statistic {worst} deviates more than by chance", *shown)
    if statistics.log_p.variance < LEAST_VARIANCE:
        return Finding("inconclusive", "the target's distributions leave too little to chance", *shown)
    if detectable.tv is not None and detectable.tv > MOST_TV:
        return Finding("inconclusive", f"{len(statistics.leak)} tested guesses are too few to show anything", *shown)
    return Finding("passed", "", *shown)


def equality(results: Sequence[Result], detail: dict[str, Any]) -> Finding:
    """The test at temperature 0: every token has the largest logit of the stock module, and the text is plain
    decoding's. A difference is a tie if rounding explains it."""
    wrong, ties, divergences = 0, 0, []
    for index, result in enumerate(results):
        reading = result.reading
        ours, plain = (decoded.tokens for decoded in result.both)
        if reading is not None:
            wrong += int((reading.short > reading.tolerance).sum())
            ties += int(((reading.short > 0) & (reading.short <= reading.tolerance)).sum())
        if ours != plain:
            divergences.append(_divergence(index, ours, plain, reading))
    bugs = [found for found in divergences if found["kind"] != "tie"]
    detail |= {"requests": len(results), "equal": len(results) - len(divergences), "wrong": wrong}
    detail |= {"ties": len(divergences) - len(bugs), "ties_of_tokens": ties, "divergences": divergences[:20]}
    worst = float(wrong + len(bugs))
    reason = ""
    if wrong:
        reason = f"{wrong} tokens do not have the largest logit of the stock module"
    elif bugs:
        reason = f"{len(bugs)} outputs differ from plain decoding's"
    return Finding("failed" if worst else "passed", reason, "top_1", worst, 0.0)


def _divergence(index: int, ours: Sequence[int], plain: Sequence[int], reading: Reading | None) -> dict[str, Any]:
    """Where two texts of a request differ first, and whether rounding alone explains it ("tie")."""
    place = next((i for i, (x, y) in enumerate(zip(ours, plain, strict=False)) if x != y), min(len(ours), len(plain)))
    found: dict[str, Any] = {"request": index, "position": place, "kind": "unknown"}
    if reading is not None and place < len(reading.gap):
        gap, tolerance = float(reading.gap[place]), float(reading.tolerance[place])
        found |= {"gap": gap, "tolerance": tolerance, "kind": "tie" if gap <= tolerance else "bug"}
    return found
