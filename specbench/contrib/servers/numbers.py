"""What is known of a server among the peers: its waiting times, its own acceptance, and whether its texts are ours."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import harmonic_mean
from typing import Any

import numpy as np

from specbench.contrib.servers.answer import AnswerAcceptance
from specbench.contrib.servers.lookup import Server
from specbench.peers.base import PeerOutput
from specbench.results.schema import EqualTexts, FirstDifference, ServerNumbers
from specbench.run.pooled import means
from specbench.stats.bootstrap import prompt_clusters, ratio
from specbench.stats.estimates import Estimate, Latency
from specbench.stats.latency import latency_summary, percentiles
from specbench.stats.records import Result

NOTHING = "the server drafted nothing"
UNFINISHED = "\ufffd"  # stands for a character whose bytes are not all there
AROUND = 40  # characters of both texts from their first difference on
NO_TEXTS = "texts are compared at temperature 0 only"


@dataclass(frozen=True)
class Streamed:
    """An answer that came piece by piece. Seconds count from the moment when the request was sent."""

    text: str
    arrivals: tuple[float, ...]  # of the first piece of each round; of each piece, where rounds are not known
    last: float  # when the last token had come
    seconds: float  # until the end
    counts: Any  # of the server's own speculative decoding
    own_tokens: int | None = None  # after the first one, by the server's own count
    own_seconds: float | None = None  # of these, by its own clock


Answers = Sequence[tuple[PeerOutput, Streamed]]


def server_numbers(
    name: str, server: Server, results: Sequence[Result], tokenizer: Any, stops: Sequence[str] | None, rows: int
) -> ServerNumbers:
    """Of a peer that is a server. `stops` are the run's stop strings, None above temperature 0; `rows` requests were
    sent at once. `results` are those of requests that it has answered."""
    outputs = [result.peers[name] for result in results]
    answers = [(output, output.streamed) for output in outputs if output.streamed is not None]
    return ServerNumbers(
        url=str(server.endpoint),
        dialect=server.dialect.name,
        version=server.version,
        model=server.model,
        prompts="ids" if server.dialect.takes_ids else "text",
        keeps_prefixes=server.dialect.keeps_prefixes,
        at_once=rows,
        latency=_latency(answers),
        tokens_per_second=_end_to_end(answers, rows),
        own_tokens_per_second=_own_rate(answers),
        **_acceptance([streamed.counts for _, streamed in answers], prompt_clusters(results)),
        texts=EqualTexts(0, 0, None, NO_TEXTS) if stops is None else _texts(results, name, tokenizer, stops),
        acceptance_law="1 if it is the likeliest token, else 0" if stops is not None else server.dialect.law,
    )


def server_notes(name: str, server: Server) -> list[str]:
    """What a reader of a server's numbers must know."""
    told = [
        f"{name} is another process, maybe on another machine, and what else it serves is not known: "
        f"{server.dialect.name} ({server.version or 'it does not tell its version'}) at {server.endpoint} with model "
        f"{server.model}"
    ]
    if server.dialect.keeps_prefixes:
        told.append(f"{name} may have kept what it read of equal beginnings of prompts, in this run or before: its "
                    "times to the first token may be too short")  # fmt: skip
    return told


def _latency(answers: Answers) -> Latency:
    """Waiting times as the client sees them, the network and HTTP included."""
    gaps = [np.diff(streamed.arrivals) for _, streamed in answers]
    later = [output.decode_seconds / output.decoded for output, _ in answers if output.decoded]
    timed = [(output, s) for output, s in answers if len(s.arrivals) > 1 < output.count]
    per_token = [(s.last - s.arrivals[0]) / (output.count - 1) for output, s in timed]
    return Latency(
        queue=percentiles([]),
        first_token=percentiles([streamed.arrivals[0] for _, streamed in answers]),
        per_token=percentiles(later),
        time_per_output_token=latency_summary(per_token),
        inter_token=latency_summary(np.concatenate(gaps)),
    )


def _end_to_end(answers: Answers, rows: int) -> float | None:
    """New tokens per second with the time to the first token; with several requests at once nothing says whose time it
    was."""
    seconds = sum(streamed.seconds for _, streamed in answers)
    return sum(output.count for output, _ in answers) / seconds if rows == 1 and seconds else None


def _own_rate(answers: Answers) -> float | None:
    """Tokens per second by the server's own clock."""
    known = [(s.own_tokens, s.own_seconds) for _, s in answers if s.own_tokens is not None and s.own_seconds]
    return sum(tokens for tokens, _ in known) / sum(seconds for _, seconds in known) if known else None


def _acceptance(counts: Sequence[AnswerAcceptance], clusters: Sequence[Hashable]) -> dict[str, Any]:
    """alpha is accepted / tested, and block efficiency tokens / rounds, where every answer tells. Counts that stand for
    several answers stand with one of them."""
    rows = [(own, cluster) for own, cluster in zip(counts, clusters, strict=True) if own != AnswerAcceptance()]
    known, names = [own for own, _ in rows], [cluster for _, cluster in rows]
    nothing = "" if any(own.drafted for own in known) else NOTHING
    no_alpha = _reason([own.no_alpha for own in known]) or nothing
    no_efficiency = _reason([own.no_block_efficiency for own in known]) or nothing
    alpha = efficiency = Estimate(None, None, 0)
    if not no_alpha:
        alpha = ratio([own.accepted or 0 for own in known], [own.tested or 0 for own in known], names)
    if not no_efficiency:
        efficiency = ratio([own.tokens or 0 for own in known], [own.rounds or 0 for own in known], names)
    drafted, accepted = (sum_of_known([getattr(own, name) for own in known]) for name in ("drafted", "accepted"))
    each = [own.tokens / own.rounds for own in known if own.tokens is not None and own.rounds]
    several = len(rows) == len(counts) == len(each) and not no_efficiency
    return {
        "block_efficiency_of_requests": ratio(each, [1] * len(each), names) if several else Estimate(None, None, 0),
        "by_place": added_places([own.by_place for own in known]) if not no_alpha else [],
        "alpha": alpha,
        "no_alpha": no_alpha,
        "block_efficiency": efficiency,
        "no_block_efficiency": no_efficiency,
        "draft_acceptance_rate": accepted / drafted if drafted and accepted is not None else None,
        "drafted": drafted,
        "accepted": accepted,
    }


def _reason(reasons: Sequence[str]) -> str:
    """The first reason that there is, and of how many answers there is one; empty if there is none."""
    given = [reason for reason in reasons if reason]
    if not given or len(given) == len(reasons):
        return given[0] if given else ""
    return f"in {len(given)} of {len(reasons)} answers {given[0]}"


def added_places(found: Sequence[Sequence[Sequence[int]]]) -> list[list[int]]:
    """Accepted and tested guesses at each place of a draft, of all."""
    longest = max(map(len, found), default=0)
    return [[sum(own[place][part] for own in found if len(own) > place) for part in (0, 1)] for place in range(longest)]


def sum_of_known(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _texts(results: Sequence[Result], name: str, tokenizer: Any, stops: Sequence[str]) -> EqualTexts:
    """How many texts are those of plain decoding; token by token where the server tells its tokens."""
    first, equal = None, 0
    for result in results:
        theirs = result.peers[name]
        assert theirs.streamed is not None
        same, ours = equal_text(theirs, result.request.tokens, result.baseline.tokens, tokenizer, stops)
        equal += same
        if not same and first is None:
            place = next((i for i, (a, b) in enumerate(zip(ours, theirs.streamed.text, strict=False)) if a != b), None)
            begin = min(len(ours), len(theirs.streamed.text)) if place is None else place
            first = FirstDifference(
                result.request.id, begin, ours[begin : begin + AROUND], theirs.streamed.text[begin : begin + AROUND]
            )
    return EqualTexts(len(results), equal, first)


def equal_text(
    theirs: PeerOutput, prompt: Sequence[int], tokens: Sequence[int], tokenizer: Any, stops: Sequence[str]
) -> tuple[bool, str]:
    """Whether a server's text is that of `tokens`, which follow a prompt, and this text as the server writes it. A
    server may write a text alone, or as it goes on after the prompt, which differs in spaces; it ends before a stop
    string, and leaves out an unfinished character at the end."""
    assert theirs.streamed is not None
    text = theirs.streamed.text
    ours = [_cut(own, stops) for own in _texts_of(tokenizer, list(prompt), list(tokens))]
    same = any(own.rstrip(UNFINISHED) == text.rstrip(UNFINISHED) for own in ours)
    if theirs.tokens is not None and not stops:
        return theirs.tokens == list(tokens), ours[0]
    return same, ours[0]


def _texts_of(tokenizer: Any, prompt: list[int], tokens: list[int]) -> list[str]:
    options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    before, whole = tokenizer.decode(prompt, **options), tokenizer.decode([*prompt, *tokens], **options)
    going_on = [whole[len(before) :]] if whole.startswith(before) else []
    return [*going_on, tokenizer.decode(tokens, **options)]


def _cut(text: str, stops: Sequence[str]) -> str:
    """The text before the first stop string in it."""
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(places, default=len(text))]


def pooled_server(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """`ServerNumbers` of all processes, as they stand in results.json: sums of counts, ratios of sums without standard
    errors, harmonic means of tokens per second, and means of waiting times."""
    first = found[0]
    texts = [own["texts"] for own in found]
    differing = [text["first_difference"] for text in texts if text["first_difference"] is not None]
    drafted, accepted = (sum_of_known([own[name] for own in found]) for name in ("drafted", "accepted"))
    return {
        **first,
        **{
            name: _pooled_ratio([own[name] for own in found if name in own])
            for name in ("alpha", "block_efficiency", "block_efficiency_of_requests")
        },
        "by_place": added_places([own.get("by_place", []) for own in found]),
        **{name: _harmonic([own[name] for own in found]) for name in ("tokens_per_second", "own_tokens_per_second")},
        "latency": means([own["latency"] for own in found]),
        **{name: next(filter(None, (own[name] for own in found)), "") for name in ("no_alpha", "no_block_efficiency")},
        "drafted": drafted,
        "accepted": accepted,
        "draft_acceptance_rate": accepted / drafted if drafted and accepted is not None else None,
        "texts": {
            **texts[0],
            **{name: sum(text[name] for text in texts) for name in ("compared", "equal")},
            "first_difference": differing[0] if differing else None,
        },
    }


def _pooled_ratio(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The ratio of the sums; where a process has none, none."""
    known = bool(found) and all(own["mean"] is not None and own["n"] for own in found)
    total = sum(own["n"] for own in found) if known else 0
    ratio = sum(own["mean"] * own["n"] for own in found) / total if total else None
    return {"mean": ratio, "stderr": None, "n": total}


def _harmonic(values: Sequence[float | None]) -> float | None:
    """The harmonic mean, if all are known."""
    known = [value for value in values if value is not None]
    return harmonic_mean(known) if len(known) == len(values) else None
