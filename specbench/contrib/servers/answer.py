"""An answer of the completions API that comes as events: its text, its tokens and when they came."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from specbench.contrib.servers.endpoint import ServerError
from specbench.errors import shown

MOST = 2**31  # of any count; token ids are below it
PIECES = 4, 64  # events that an answer may have: so many for each token that was asked for, and so many more
FINISHED = ("stop", "length", "eos_token", "stop_sequence")  # reasons of an answer that is complete
CHARACTER = 4  # tokens of one character at most, whose text can be missing at the end
Count = Annotated[int, Field(ge=0, lt=MOST)]
Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]


class Timings(BaseModel):
    """llama.cpp's counts and times so far."""

    predicted_n: Count | None = None
    predicted_ms: Seconds | None = None
    draft_n: Count = 0
    draft_n_accepted: Count = 0


class Usage(BaseModel):
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None


class Choice(BaseModel):
    text: str | None = None
    finish_reason: str | None = None
    token_ids: list[Count] | None = None


class Event(BaseModel):
    """One event of an answer; other fields are not read."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    timings: Timings | None = None


EVENT = TypeAdapter(Event)


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
    timings: Timings = field(default_factory=Timings)  # at the end
    told: Mapping[str, Any] = field(default_factory=dict)  # vLLM's and SGLang's counts of its own rounds, at the end
    sent: float = 0.0  # the moment by `time.perf_counter`

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def first(self) -> int:
        """Tokens of the first piece: the first step's. Where a server does not count them it is taken for one, unless
        the whole answer is one piece."""
        return self.tokens if len(self.pieces) == 1 else self.pieces[0].tokens or 1


def read_answer(events: Iterable[tuple[float, Mapping[str, Any]]], limit: int, vocabulary: int = MOST) -> Answer:
    """Reads the events of an answer of at most `limit` tokens below `vocabulary` to their end, as `Endpoint.stream`
    yields them. Raises ServerError if they are not what the API says, contradict themselves, end too early, or go on
    without end."""
    events = iter(events)
    found, ids = Answer(sent=next(events)[0]), list[int]()
    for number, (moment, event) in enumerate(events):
        if number > PIECES[0] * limit + PIECES[1] or len(ids) > limit:
            raise ServerError(f"the server goes on after {number} events, where at most {limit} tokens were asked for")
        try:
            _add(found, ids, EVENT.validate_python(event, strict=True), moment - found.sent)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise ServerError("the server sent an event of another shape than the API's "
                              f"({where}={shown(first['input'])}: {first['msg']})") from error  # fmt: skip
        found.told = told_in(event) or found.told
    found.ids = ids or None
    if outside := [token for token in ids if token >= vocabulary]:
        raise ServerError(f"the server sent token {outside[0]}, and the target has {vocabulary}")
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


def _add(found: Answer, ids: list[int], event: Event, seconds: float) -> None:
    """Adds an event to an answer."""
    timings, usage, choices = event.timings or Timings(), event.usage or Usage(), event.choices or []
    if event.timings is not None:
        before = found.timings
        if not 0 <= timings.draft_n_accepted - before.draft_n_accepted <= timings.draft_n - before.draft_n:
            raise ServerError(f"the server's count of guesses went from {before.draft_n_accepted} accepted of "
                              f"{before.draft_n} to {timings.draft_n_accepted} of {timings.draft_n}")  # fmt: skip
        found.timings = timings
    if usage.prompt_tokens is not None:
        found.prompt_tokens = usage.prompt_tokens
    text = "".join(choice.text or "" for choice in choices)
    own = [token for choice in choices for token in choice.token_ids or ()]
    ids += own
    now = timings.predicted_n if usage.completion_tokens is None else usage.completion_tokens
    now = len(ids) if now is None and own else now
    if now is not None and now < found.tokens:
        raise ServerError(f"the server's count of tokens went from {found.tokens} to {now}")
    if text or ((now or 0) > found.tokens and (found.tokens or not found.pieces)):  # a sum at the end is no piece
        found.pieces.append(AnswerPiece(seconds, text, now, found.timings.draft_n, found.timings.draft_n_accepted))
    found.tokens = now or found.tokens
    for choice in choices:
        if choice.finish_reason:
            found.finish, found.finished = choice.finish_reason, seconds


def _refuse_inconsistent(found: Answer, limit: int) -> None:
    """Raises ServerError if an answer is cut off, or its counts cannot be right."""
    if not found.finish:
        raise ServerError("the server ended the connection in the middle of an answer")
    if found.finish not in FINISHED:
        raise ServerError(f"the server ended its answer for another reason than its length or a stop: "
                          f"{shown(found.finish)}")  # fmt: skip
    if not found.tokens:
        raise ServerError("the server does not say how many tokens its answer has (usage.completion_tokens)")
    if not found.pieces or (found.ids is None and found.tokens >= CHARACTER and not found.text):
        raise ServerError("the server's answer has no text")
    if found.tokens > limit:
        raise ServerError(f"the server counted {found.tokens} new tokens where at most {limit} were asked for")
    if found.finish == "length" and found.tokens < limit:
        raise ServerError(f"the server ended after {found.tokens} of {limit} tokens and calls that the limit: is its "
                          "context shorter than the target's?")  # fmt: skip
    if found.ids is not None and len(found.ids) != found.tokens:
        raise ServerError(f"the server sent {len(found.ids)} tokens and counted {found.tokens}")
