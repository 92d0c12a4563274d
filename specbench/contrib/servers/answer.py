"""An answer of the completions API that comes as events: its text, its tokens and when they came."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from specbench.contrib.servers.endpoint import ServerError
from specbench.errors import shown


@dataclass(frozen=True)
class AnswerAcceptance:
    """Counts of a server's own speculative decoding, over rounds; None where they are not known."""

    rounds: int | None = None
    tokens: int | None = None  # that these rounds emitted
    drafted: int | None = None
    accepted: int | None = None  # also guesses that a stop or the limit then cut off
    tested: int | None = None  # guesses up to the first rejected one of their round, that one included
    no_alpha: str = ""  # why `tested` is not known
    no_block_efficiency: str = ""  # why tokens a round are not
    by_place: tuple[tuple[int, int], ...] = ()  # accepted and tested guesses at each place of a draft, if known


@dataclass(frozen=True)
class AnswerPiece:
    """What one event brought."""

    seconds: float  # since the request was sent
    text: str
    tokens: int | None  # of the answer so far, this piece included, if the server tells
    drafted: int = 0  # guesses so far
    accepted: int = 0


@dataclass
class Answer:
    """One answer, complete and consistent. `pieces` are those with text or tokens in them."""

    pieces: list[AnswerPiece] = field(default_factory=list)
    ids: list[int] | None = None  # new tokens, if the server tells
    tokens: int = 0  # all new ones
    prompt_tokens: int | None = None
    finish: str = ""
    finished: float = 0.0  # seconds until the server told why it ended
    timings: Mapping[str, Any] = field(default_factory=dict)  # llama.cpp's, at the end
    told: Mapping[str, Any] = field(default_factory=dict)  # vLLM's and SGLang's counts of its own rounds, at the end
    sent: float = 0.0  # the moment by `time.perf_counter`

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def first(self) -> int:
        """Tokens of the first piece: the first step's. Where a server does not count them it is taken for one."""
        return self.pieces[0].tokens or 1


def read_answer(events: Iterable[tuple[float, Mapping[str, Any]]], limit: int) -> Answer:
    """Reads the events of an answer of at most `limit` tokens to their end, as `Endpoint.stream` yields them. Raises
    ServerError if they are not what the API says, contradict themselves, or end too early."""
    events = iter(events)
    found, counted = Answer(sent=next(events)[0]), 0
    ids: list[int] = []
    try:
        for moment, event in events:
            seconds = moment - found.sent
            timings, usage = _part(event, "timings"), _part(event, "usage")
            found.timings = timings or found.timings
            found.told = told_in(event) or found.told
            if "prompt_tokens" in usage:
                found.prompt_tokens = _count(usage["prompt_tokens"])
            now = usage.get("completion_tokens", timings.get("predicted_n"))
            text, finish = "", None
            own: list[int] = []
            for choice in event.get("choices") or []:
                text, finish = text + (choice.get("text") or ""), choice.get("finish_reason") or finish
                own += choice.get("token_ids") or []
            ids += own
            now = _count(now) if now is not None else len(ids) if own else None
            if now is not None and now < counted:
                raise ServerError(f"the server's count of tokens went from {counted} to {now}")
            if text or ((now or 0) > counted and (counted or not found.pieces)):  # a sum at the end is no piece
                guesses = (_count(timings.get(name, 0)) for name in ("draft_n", "draft_n_accepted"))
                found.pieces.append(AnswerPiece(seconds, text, now, *guesses))
            counted = now or counted
            if finish:
                found.finish, found.finished = finish, seconds
    except (TypeError, AttributeError, ValueError) as error:
        raise ServerError(f"the server sent an event of another shape than the API's ({error})") from error
    found.tokens, found.ids = counted, ids or None
    _refuse_inconsistent(found, limit)
    return found


def told_in(event: Mapping[str, Any]) -> Mapping[str, Any]:
    """What an event tells of the answer's own rounds: vLLM's `metrics.speculative_decoding`, SGLang's `meta_info` or
    `sglext.spec_tokens_details`; empty if nothing."""
    choices = event.get("choices") or [{}]
    for path in ((event, "metrics", "speculative_decoding"), (event, "sglext", "spec_tokens_details"),
                 (choices[0], "meta_info"), (event, "meta_info")):  # fmt: skip
        found: Any = path[0]
        for name in path[1:]:
            found = found.get(name) if isinstance(found, Mapping) else None
        if isinstance(found, Mapping) and ("num_spec_steps" in found or "spec_verify_ct" in found):
            return found
    return {}


def _part(event: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = event.get(name) or {}
    if not isinstance(part, Mapping):
        raise TypeError(f"{name} is {shown(part)}")
    return part


def _count(value: Any) -> int:
    """A count of the server's. Raises ValueError if it is none."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{shown(value)} is no count of tokens")
    return value


def _refuse_inconsistent(found: Answer, limit: int) -> None:
    """Raises ServerError if an answer is cut off, or its counts cannot be right."""
    if not found.finish:
        raise ServerError("the server ended the connection in the middle of an answer")
    if not found.tokens:
        raise ServerError("the server does not say how many tokens its answer has (usage.completion_tokens)")
    if not found.pieces:
        raise ServerError("the server's answer has no text")
    if found.tokens > limit:
        raise ServerError(f"the server counted {found.tokens} new tokens where at most {limit} were asked for")
    if found.finish == "length" and found.tokens < limit:
        raise ServerError(f"the server ended after {found.tokens} of {limit} tokens and calls that the limit: is its "
                          "context shorter than the target's?")  # fmt: skip
    if found.ids is not None and len(found.ids) != found.tokens:
        raise ServerError(f"the server sent {len(found.ids)} tokens and counted {found.tokens}")
