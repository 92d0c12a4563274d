"""What a run by beam search is judged and described by: equal beams, scores by the stock module, and cost (A.4)."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specbench.contrib.beams.search_state import BeamRules, FoundBeams
from specbench.decoding.encoder_input import EncoderInput
from specbench.models.language_model import LanguageModel
from specbench.models.reference_forward import stock_logits
from specbench.results.schema import BeamNumbers
from specbench.run.reference_scores import refuse_too_long
from specbench.stats.estimates import Lossless, Reread
from specbench.stats.records import Result, RunRecord
from specbench.stats.reference_distribution import ROUNDINGS, TYPICAL_16_BIT, tolerance

SUMMED = (
    "levels", "plain_levels", "calls", "target_runs", "plain_target_runs", "drafter_runs", "equal", "requests",
)  # fmt: skip


@dataclass(frozen=True)
class Rescored:
    """The score of the best hypothesis by the stock module, and how far rounding may move it."""

    score: float
    tolerance: float
    tokens: int
    seconds: float


def stock_score(
    model: LanguageModel,
    prompt: Sequence[int],
    new: Sequence[int],
    rules: BeamRules,
    encoder_input: EncoderInput | None = None,
) -> Rescored:
    """Scores the new tokens behind a prompt, and an encoder's input if there is one, by one plain forward of the stock
    module. Raises MemoryError or RuntimeError if the device has no room for it."""
    clock = time.perf_counter()
    text = torch.tensor([[*prompt, *new]], device=model.device)
    refuse_too_long(model, max(text.shape[1], len(encoder_input or ())))
    logits = stock_logits(model, text, len(prompt), encoder_input, suppressing=False).float()
    log_p = logits.double().log_softmax(-1).gather(1, text[0, len(prompt) :, None])
    share = (model.forced_tokens + len(new)) ** -rules.length_penalty
    typical = TYPICAL_16_BIT if model.dtype in ROUNDINGS else 1.0
    slack = 2 * typical * tolerance(logits, model.dtype, model.sampling).sum()  # a token's logit, and the others' sum
    seconds = time.perf_counter() - clock
    return Rescored(float(log_p.sum()) * share, float(slack) * share, len(new), seconds)


def judge_beams(record: RunRecord) -> Lossless:
    """The verdict on a run by beam search: all hypotheses are plain beam search's, or differ by what rounding explains,
    and each best score is the stock module's. In 16 bits roundings are too large to tell a tie from an error: other
    beams are then inconclusive."""
    known: list[tuple[Result, Rescored]] = [(r, r.reading) for r in record.results if r.reading is not None]
    wrong = sum(not abs(_both(r)[0].hypotheses[0].score - found.score) <= found.tolerance for r, found in known)
    equal = sum(same_beams(result) for result in record.results)
    others = [result for result in record.results if not same_beams(result)]
    unclear = sum(_both(result)[0].coarse for result in others)
    ties = sum(_is_tie(result) for result in others if not _both(result)[0].coarse)
    bugs = len(others) - unclear - ties
    verdict, reason = "passed", ""
    if wrong or bugs:
        verdict = "failed"
        reason = f"{wrong} best scores are not the stock module's" if wrong else f"{bugs} requests have other beams"
    elif not sum(r.tested for result in record.results for r in result.speculative.rounds):
        verdict, reason = "untested", "no level was tested, only plain steps were made"
    elif not known:
        verdict, reason = "untested", record.unread or "no text was scored again"
    elif unclear:
        verdict, reason = "inconclusive", f"{unclear} requests have other beams, in 16 bits, by rounding or by an error"
    elif record.unreadable:
        verdict, reason = "inconclusive", f"a text could not be scored again ({record.unread})"
    return Lossless(
        expected=True,
        passed={"passed": True, "failed": False}.get(verdict),
        verdict=verdict,
        reason=reason,
        method="beams",
        statistic=float(wrong + bugs),
        threshold=0.0,
        detail={"requests": len(record.results), "equal": equal, "ties": ties, "unclear": unclear,
                "wrong_scores": wrong, "scored_again": len(known),
                "largest_difference": max((_difference(result) for result in record.results), default=0.0)},
        reread=Reread(len(known), sum(f.tokens for _, f in known), sum(f.seconds for _, f in known)),
    )  # fmt: skip


def _both(result: Result) -> tuple[FoundBeams, FoundBeams]:
    ours, plain = result.both
    return ours.search, plain.search


def same_beams(result: Result) -> bool:
    """Whether both ways found the same hypotheses in the same order."""
    ours, plain = _both(result)
    return [h.tokens for h in ours.hypotheses] == [h.tokens for h in plain.hypotheses]


def _difference(result: Result) -> float:
    """The largest difference of the scores of both ways, rank by rank."""
    pairs = zip(*(found.hypotheses for found in _both(result)), strict=False)
    return max((abs(a.score - b.score) for a, b in pairs), default=0.0)


def _is_tie(result: Result) -> bool:
    """Whether rounding explains that the beams differ: as many, and rank by rank with the same scores."""
    ours, plain = _both(result)
    alike = len(ours.hypotheses) == len(plain.hypotheses)
    return alike and result.reading is not None and _difference(result) <= result.reading.tolerance


def beam_numbers(results: Sequence[Result], rules: BeamRules, gamma: int, c_hat: float) -> BeamNumbers:
    """Widths, counts and cost of a run by beam search."""
    ours, plain = ([_both(result)[way] for result in results] for way in (0, 1))
    read, drafted, theirs = (
        sum(f.target_tokens for f in ours), sum(f.drafter_tokens for f in ours), sum(f.target_tokens for f in plain)
    )  # fmt: skip
    calls = sum(f.calls for f in ours)
    return BeamNumbers(
        beams=rules.width,
        drafter_beams=rules.drafter_width,
        length_penalty=rules.length_penalty,
        early_stopping=rules.early_stopping,
        levels=sum(f.levels for f in ours),
        plain_levels=sum(f.levels for f in plain),
        calls=calls,
        target_runs=read,
        plain_target_runs=theirs,
        drafter_runs=drafted,
        target_runs_a_call=read / calls,
        most_target_runs_a_call=rules.width + rules.drafter_width * gamma,
        operations_factor=(read + c_hat * drafted) / theirs,
        equal=sum(same_beams(result) for result in results),
        requests=len(results),
    )


def pooled_beam_numbers(found: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The `BeamNumbers` of several processes as they stand in results.json: counts are summed, and ratios are those of
    the sums. The operations of plain beam search are its target runs. None if there are none."""
    if not found:
        return None
    pooled = {**found[0], **{name: sum(own[name] for own in found) for name in SUMMED}}
    operations = sum(own["operations_factor"] * own["plain_target_runs"] for own in found)
    return pooled | {
        "target_runs_a_call": pooled["target_runs"] / pooled["calls"],
        "operations_factor": operations / pooled["plain_target_runs"],
    }
