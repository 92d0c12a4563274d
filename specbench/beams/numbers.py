"""What a run by beam search is judged and described by: equal beams, scores by the stock module, and cost (A.4)."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from specbench.beams.search import BeamRules, FoundBeams
from specbench.decoding.sequence import EncoderInput
from specbench.measure.record import Record
from specbench.models.language_model import LanguageModel
from specbench.models.reference_forward import stock_logits

HALVES = (torch.float16, torch.bfloat16)
# How far a logit may move by rounding, in units of the last place at the largest logit: of sums in 32 and in 16 bits.
ROUNDING, ROUNDING_OF_HALVES = 64.0, 1.0


def kept(ours: FoundBeams, plain: FoundBeams, score: tuple[float, float] | None) -> dict[str, Any]:
    """What a record keeps of a search: both ways' hypotheses and counts, and the best score by the stock module with
    how far rounding may move it, if it was scored again."""
    found: dict[str, Any] = {}
    for name, own in (("speculative", ours), ("baseline", plain)):
        found[name] = asdict(own) | {"hypotheses": [[list(each.tokens), each.score] for each in own.hypotheses]}
    return found | dict(zip(("score", "tolerance"), score or (None, None), strict=True))


def stock_score(
    model: LanguageModel, prompt: Sequence[int], new: Sequence[int], rules: BeamRules, read: EncoderInput | None
) -> tuple[float, float]:
    """The score of new tokens behind a prompt, and an encoder's input if there is one, by one plain forward of the
    stock module, and how far rounding may move it. Raises RuntimeError if the device has no room for it."""
    text = torch.tensor([[*prompt, *new]], device=model.device)
    logits = stock_logits(model, text, len(prompt), read, suppressing=False).float()
    log_p = logits.double().log_softmax(-1).gather(1, text[0, len(prompt) :, None])
    share = (model.forced_tokens + len(new)) ** -rules.length_penalty
    units = ROUNDING_OF_HALVES if model.dtype in HALVES else ROUNDING
    largest = torch.where(logits > -torch.inf, logits.abs(), 0.0).amax(-1).double().sum()
    slack = 2 * units * torch.finfo(model.dtype).eps * largest  # a token's logit, and the sum of the others
    return float(log_p.sum()) * share, float(slack) * share


def same_beams(search: dict[str, Any]) -> bool:
    """Whether both ways found the same hypotheses in the same order."""
    ours, plain = ([tokens for tokens, _ in search[way]["hypotheses"]] for way in ("speculative", "baseline"))
    return ours == plain


def difference(search: dict[str, Any]) -> float:
    """The largest difference of the scores of both ways, rank by rank."""
    pairs = zip(search["speculative"]["hypotheses"], search["baseline"]["hypotheses"], strict=False)
    return max((abs(ours[1] - plain[1]) for ours, plain in pairs), default=0.0)


def is_tie(search: dict[str, Any]) -> bool:
    """Whether rounding explains that the beams differ: as many, and rank by rank with the same scores."""
    alike = len(search["speculative"]["hypotheses"]) == len(search["baseline"]["hypotheses"])
    return alike and search["tolerance"] is not None and difference(search) <= search["tolerance"]


def judge(records: Sequence[Record], coarse: bool) -> dict[str, Any]:
    """The verdict: all hypotheses are plain beam search's, or differ by what rounding explains, and each best score is
    the stock module's. If log p were computed in 16 bits (`coarse`) roundings are too large to tell a tie from an
    error."""
    searches = [record.search for record in records if record.search is not None]
    scored = [search for search in searches if search["score"] is not None]
    wrong = sum(
        not abs(search["speculative"]["hypotheses"][0][1] - search["score"]) <= search["tolerance"] for search in scored
    )
    others = [search for search in searches if not same_beams(search)]
    bugs = 0 if coarse else sum(not is_tie(search) for search in others)
    tested = sum(sum(record.speculative.rounds.tested) for record in records if record.speculative is not None)
    passed: bool | None = True
    reason = ""
    if wrong or bugs:
        passed = False
        reason = f"{wrong} best scores are not the stock module's" if wrong else f"{bugs} requests have other beams"
    elif not tested or not scored:
        passed = None
        reason = "no text was scored again" if tested else "no level was tested, only plain steps were made"
    elif coarse and others:
        passed = None
        reason = f"{len(others)} requests have other beams, in 16 bits, by rounding or by an error"
    return {"expected": True, "passed": passed, "reason": reason, "detectable": None}


def cost(records: Sequence[Record], rules: BeamRules, gamma: int, c_hat: float) -> dict[str, Any]:
    """Widths, counts and cost of a run by beam search, for details["beam"]."""
    searches = [record.search for record in records if record.search is not None]

    def total(way: str, name: str) -> int:
        return sum(search[way][name] for search in searches)

    read, drafted = total("speculative", "target_tokens"), total("speculative", "drafter_tokens")
    plain, calls = total("baseline", "target_tokens"), total("speculative", "calls")
    return {
        "beams": rules.width,
        "drafter_beams": rules.drafter_width,
        "length_penalty": rules.length_penalty,
        "levels": total("speculative", "levels"),
        "calls": calls,
        "target_runs": read,
        "plain_target_runs": plain,
        "drafter_runs": drafted,
        "most_target_runs_a_call": rules.width + rules.drafter_width * gamma,
        "operations_factor": (read + c_hat * drafted) / max(1, plain),
        "equal": sum(map(same_beams, searches)),
        "requests": len(searches),
    }
