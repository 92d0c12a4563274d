"""vLLM's counters at /metrics, which are of all its requests together, as numbers of accepted and tested guesses."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise

from specbench.contrib.servers.answer import Answer, AnswerAcceptance
from specbench.contrib.servers.endpoint import Endpoint, ServerError

SAMPLE = re.compile(r"^(\w+:\w+)(?:\{(.*)\})? (\S+)(?: \d+)?$")  # of Prometheus' text format
PLACE = re.compile(r'position="(\d{1,4})"')
MOST = 2**53  # of a counter, whose values are 64-bit floats
NEW_TOKENS = ("vllm:generation_tokens_total", None)
Metrics = dict[tuple[str, int | None], float]  # counters by name and place in the draft


def metrics_of(endpoint: Endpoint) -> Metrics | str:
    """The counters of vLLM, summed over its engines, or why there are none."""
    found: Metrics = {}
    try:
        text = endpoint.get("/metrics")
    except ServerError as error:
        return f"its counters cannot be read ({error})"
    for line in text.splitlines():
        sample = SAMPLE.match(line)
        if sample is None or not sample[1].startswith("vllm:"):
            continue
        place = PLACE.search(sample[2] or "")
        name = sample[1], int(place[1]) if place else None
        with suppress(ValueError):
            if 0 <= (value := float(sample[3])) <= MOST:
                found[name] = found.get(name, 0.0) + value
    return found


def vllm_acceptance(grown: Mapping[tuple[str, int | None], float], answers: Sequence[Answer]) -> AnswerAcceptance:
    """What vLLM's counters say of answers during which they have grown by so much.

    A guess is tested if all before it were accepted: at place i as often as guesses were accepted at place i - 1, at
    the first as often as there were drafts. That holds if all drafts were as long as the longest. Target calls without
    a draft, which prompt lookup has, are in no counter: see `target_calls`."""
    tokens, spec = sum(answer.tokens for answer in answers), "vllm:spec_decode_num_"

    def count(name: str, place: int | None = None) -> int:
        return round(grown.get((f"{spec}{name}_total", place), 0.0))

    if (seen := grown.get(NEW_TOKENS)) != tokens:
        told = "do not count tokens" if seen is None else f"have {seen:.0f} new tokens where {tokens} were received"
        why = f"the server's counters {told}: others used it meanwhile, or it has several processes"
        return AnswerAcceptance(no_alpha=why, no_block_efficiency=why)
    drafts, drafted, accepted = count("drafts"), count("draft_tokens"), count("accepted_tokens")
    places = sorted(
        place for name, place in grown if name == f"{spec}accepted_tokens_per_pos_total" and place is not None
    )
    by_place = [count("accepted_tokens_per_pos", place) for place in places]
    counts = [drafts, *by_place, 0]  # no guess is accepted more often than the one before it
    if places != list(range(len(places))) or not sum(by_place) == accepted <= drafted or counts != sorted(counts)[::-1]:
        why = "the server's counts of drafts, guesses and accepted tokens by place contradict each other"
        return AnswerAcceptance(no_alpha=why, no_block_efficiency=why)
    no_alpha = no_efficiency = ""
    if drafted != drafts * len(places):
        no_alpha = (
            f"drafts had different lengths ({drafted} tokens in {drafts} drafts of up to {len(places)}), so how many "
            "guesses were tested is not known"
        )
    if (calls := target_calls(answers, drafts, by_place)) is None and drafts:
        no_efficiency = "the pieces of its answers are not its steps, so how many target calls it made is not known"
    emitted = None if calls is None else tokens - sum(answer.first for answer in answers)
    tested = None if no_alpha else drafts + sum(by_place[:-1])
    places_of = () if no_alpha else tuple(zip(by_place, [drafts, *by_place], strict=False))
    return AnswerAcceptance(calls, emitted, drafted, accepted, tested, no_alpha, no_efficiency, places_of)


def target_calls(answers: Sequence[Answer], drafts: int, by_place: Sequence[int]) -> int | None:
    """The target calls after the first tokens of answers, with and without a draft: their pieces, each of which vLLM
    sends after a step, the first of one token. None if that cannot be: it sends several steps as one piece if the
    client falls behind.

    At least i + 2 tokens have as many pieces as guesses were accepted at place i, and fewer only by the last pieces of
    answers, which a stop or the limit has cut."""
    sizes = []
    for answer in answers:
        counts = [piece.tokens for piece in answer.pieces if piece.tokens is not None]
        if len(counts) < len(answer.pieces) or counts[0] != 1:
            return None
        sizes.append([size for a, b in pairwise(counts) if (size := b - a)])
    for least, accepted in enumerate([*by_place, 0], start=2):
        seen = sum(size >= least for own in sizes for size in own)
        if not seen <= accepted <= seen + sum(own[-1] < least for own in sizes if own):
            return None
    calls = sum(map(len, sizes))
    return calls if calls >= drafts else None
