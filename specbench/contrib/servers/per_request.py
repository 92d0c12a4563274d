"""What vLLM and SGLang tell of one answer's own rounds: counts of accepted guesses by round."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specbench.contrib.servers.answer import Answer, AnswerAcceptance
from specbench.settings import LARGEST_GAMMA

VARIED = "drafts had different lengths and the server tells no lengths, so how many guesses were tested is not known"
ODD = "what the server tells of its rounds contradicts itself"
MERGED = "the pieces of its answers are not its steps, so how many target calls it made is not known"
MOST = 10**6  # rounds of an answer, and guesses in them


def answer_acceptance(answer: Answer) -> AnswerAcceptance | None:
    """Counts over the rounds of an answer, None if its server tells none. A round that drafted nothing is in no count,
    so rounds are the pieces after the first token, if these can be: the last may have been cut, by a stop or the limit,
    and then has fewer tokens than were accepted."""
    told = answer.told
    names = ("spec_correct_drafts_histogram", "spec_accept_histogram", "acceptance_histogram")
    histogram = next((told[name] for name in names if name in told), None)
    drafted = _first(told, "num_draft_tokens", "spec_num_proposed_drafts", "spec_draft_token_num")
    steps = _first(told, "num_spec_steps", "spec_verify_ct")
    if not told or histogram is None:
        return None
    per_step = [told.get(f"per_step_{name}") for name in ("accepted", "drafted")]
    if not all(_counts(found) for found in (histogram, [drafted, steps])):
        return AnswerAcceptance(no_alpha=ODD, no_block_efficiency=ODD)
    accepted = sum(j * rounds for j, rounds in enumerate(histogram))
    longest = max(len(histogram) - 1, 0)
    if sum(histogram) != steps or accepted > drafted or longest > LARGEST_GAMMA:
        return AnswerAcceptance(no_alpha=ODD, no_block_efficiency=ODD)
    pairs: list[tuple[int, int]] | None = None
    if all(_counts(found) for found in per_step):
        pairs = list(zip(*per_step, strict=False))
    elif drafted == steps * longest:
        pairs = [(j, longest) for j, rounds in enumerate(histogram) for _ in range(rounds)]
    if pairs is not None and (len(pairs) != steps or any(not a <= d <= LARGEST_GAMMA for a, d in pairs)
                              or [sum(pair[i] for pair in pairs) for i in (0, 1)] != [accepted, drafted]):  # fmt: skip
        return AnswerAcceptance(no_alpha=ODD, no_block_efficiency=ODD)
    tokens = answer.tokens - answer.first
    rounds = len({piece.tokens for piece in answer.pieces}) - 1
    fits = rounds >= steps and 0 <= accepted - (tokens - rounds) <= longest and answer.pieces[0].tokens == answer.first
    known: dict[str, Any] = {"rounds": rounds, "tokens": tokens} if fits else {"no_block_efficiency": MERGED}
    known |= {"drafted": drafted, "accepted": accepted}
    if pairs is None:
        return AnswerAcceptance(**known, no_alpha=VARIED)
    return AnswerAcceptance(**known, tested=sum(a + (a < d) for a, d in pairs), by_place=by_place(pairs))


def by_place(pairs: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Accepted and tested guesses at each place of a draft, from (accepted, drafted) of each round."""
    longest = max((d for _, d in pairs), default=0)
    accepted, tested = (_beyond(ends, longest) for ends in ([a for a, _ in pairs], [min(a + 1, d) for a, d in pairs]))
    return tuple(zip(accepted, tested, strict=True))


def _beyond(ends: Sequence[int], longest: int) -> list[int]:
    """How many of the numbers are above each of 0 .. longest - 1."""
    found: list[int] = np.bincount(ends, minlength=longest + 1)[::-1].cumsum()[::-1][1:].tolist()
    return found


def _first(told: Mapping[str, Any], *names: str) -> Any:
    return next((told[name] for name in names if name in told), None)


def _counts(found: Any) -> bool:
    """Whether these are counts within bounds."""
    return isinstance(found, list) and len(found) <= MOST and all(type(n) is int and 0 <= n <= MOST for n in found)
