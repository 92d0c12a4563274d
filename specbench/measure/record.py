"""The record of a request: one line of `prompts.jsonl`. Every number of a run is computed from these lines and `Facts`.

A request is one turn of a prompt. Lists of `Rounds` have one entry per round; all times are seconds.
"""

import json
import math
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import IO, Annotated, Any, Literal, NotRequired

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # that of Python 3.11 is not read by pydantic

from specbench.errors import ConfigError, first_line, shown
from specbench.settings import LARGEST, LARGEST_GAMMA

SCHEMA_VERSION = 3  # of the names in results.json
Status = Literal["complete", "interrupted"]
Count = Annotated[int, Field(ge=0, le=2**53)]
Some = Annotated[int, Field(ge=1, le=2**53)]
Depth = Annotated[int, Field(ge=0, le=LARGEST_GAMMA)]
Number = Annotated[float, Field(ge=0, le=LARGEST, allow_inf_nan=False)]


def not_below_0(value: float) -> float:
    """The value, also if it is NaN. Raises ValueError."""
    if value < 0 or value == math.inf:
        raise ValueError("greater than or equal to 0 and finite")
    return value


# Of probabilities: also NaN, where a model's are no numbers, since such a run must have its verdict.
Sum = Annotated[float, AfterValidator(not_below_0)]
Share = Annotated[float, Field(ge=0, le=1 + 1e-4)]  # a sum of float32 may be more than 1 by rounding


@dataclass
class Rounds:
    """The rounds of one request as columns. Plain decoding is recorded as rounds without a draft."""

    gamma: list[Depth] = field(default_factory=list)  # depth of the draft
    drafted: list[Count] = field(default_factory=list)  # guesses in it; of a tree, its nodes
    tested: list[Depth] = field(default_factory=list)  # steps that were tested, none beyond a stop
    accepted: list[Depth] = field(default_factory=list)  # guesses that were accepted and kept
    tokens: list[Count] = field(default_factory=list)  # tokens kept, recovered or bonus token included
    recovered: list[Count] = field(default_factory=list)  # 1 if a recovered token was kept
    bonus: list[Count] = field(default_factory=list)  # 1 if a bonus token was kept
    steps: list[Count] = field(default_factory=list)  # drafter steps of the call, for all of its rows together
    rows: list[Some] = field(default_factory=list)  # rows that the call served
    width: list[Count] = field(default_factory=list)  # tokens of each row that the target's call read
    lenience: list[Number] = field(default_factory=list)
    draft: list[Number] = field(default_factory=list)  # seconds of the whole call in the drafter
    verify: list[Number] = field(default_factory=list)  # in the target
    accept: list[Number] = field(default_factory=list)  # in the verifier
    host: list[Number] = field(default_factory=list)  # in Python between calls, or in front of a round's one graph
    betas: list[list[Sum]] = field(default_factory=list)  # of each tested step; of a tree it may be more than 1

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, **values: Any) -> None:
        """Appends one round: a value for each column."""
        for name, column in vars(self).items():
            column.append(values[name])


@dataclass
class Text:
    """What one method of decoding made of a request."""

    ids: list[Count]  # new tokens
    text: str  # of these, without special tokens
    seconds: Number  # of decoding, without prefill: each call's seconds are split evenly among the rows that it served
    prefill_seconds: Number  # the target read the prompt
    drafter_prefill_seconds: Number  # the drafter read the prompt
    record_seconds: Number  # measuring, which is no part of the other times
    rounds: Rounds  # each of them; of plain decoding, its steps
    times: dict[str, Number] | None = None  # arrived, admitted, first_token, finished, if requests arrive


class Peer(TypedDict, total=False):
    """What a peer made of a request: its text, or the error."""

    tokens: Count
    seconds: Number
    text: str
    ids: list[Count]
    error: str


class Distances(TypedDict):
    """Sums over the positions at which a decoder's distribution was kept; see `measure.verdict.compared`."""

    positions: Count
    tv: NotRequired[float]
    limit: NotRequired[float]
    beyond: Count


class Reading(TypedDict, total=False):
    """What was read of a text for the verdict, in the order in which it is written, or why it was not."""

    unread: str
    error: bool
    tokens: Count
    tested: Count
    rule: str | None
    p: Distances
    q: Distances
    wrong: Count
    divergence: Literal["", "tie", "bug"]
    sums: list[list[float]]
    impossible: Count
    ended: bool  # at the first stop or at the limit


@dataclass
class Record:
    """One request, decoded by all methods."""

    id: str  # of the request: the prompt's, with /1, /2, .. if it has several turns
    prompt_id: str  # as the data have it
    turn: Count  # of the prompt, from 0
    category: str  # as the data have it
    process: Count  # number of the process among repeats, else 0
    group: Count  # requests that were decoded together have one number
    prompt: str  # as the models read it
    prompt_tokens: Count  # of the prompt
    encoder_tokens: Count | None  # tokens that an encoder read
    limit: Count  # the largest number of new tokens
    speculative: Text | None  # None if it failed, as is `baseline`
    baseline: Text | None  # plain decoding
    peers: dict[str, Peer] = field(default_factory=dict)  # by name: tokens, seconds, text, ids, or error
    target_text: dict[str, Sum] | None = None  # sum of `beta` and number of `positions` along plain decoding's text
    drift: dict[str, Sum] | None = None  # of lossy runs: sums of `tv` and `kl`, largest `bound`, and `positions`
    verdict: Reading | None = None  # sums of the verdict's reading; None if the text was not read
    search: dict[str, Any] | None = None  # what `decoding=beam` keeps
    failed: str | None = None  # the error, in one sentence

    def line(self) -> str:
        """The record as JSON in one line, without the newline."""
        return json.dumps(vars(self), default=vars, ensure_ascii=False)


@dataclass
class Facts:
    """What results need beside the records of a run. They are stored in `results["details"]["facts"]`."""

    name: str
    config: dict[str, Any]
    provenance: dict[str, Any]
    gamma: Count | None = None  # of a fixed policy, else None
    greedy: bool = False  # temperature 0
    expected_lossless: bool = True
    lossy_reason: str = ""
    batch_size: Count = 1
    c_hat: Number | None = None  # operations of a drafter step over those of a target step (Definition 3.10)
    step_bytes: Number = 0.0  # weights that a target step reads
    column_bytes: Number = 0.0  # keys and values of one token
    peak_bytes_per_second: Number = 0.0  # that the memory was measured to read; 0 if it was not measured
    memory: dict[str, Number] = field(default_factory=dict)  # peak_bytes, weights_bytes, kv_bytes
    seconds: dict[str, Number] = field(default_factory=dict)  # start, load, warm_up, plain, speculative, peers, ...
    drafter_context: Count | None = None  # the longest text that the drafter can read, tokens; None if any
    begin: Count | None = None  # tokens that every text begins with, None if these are its prompt's
    status: Status = "complete"
    notes: list[str] = field(default_factory=list)
    data: str = ""  # a hash of the prompts as data
    dtype: str = ""  # of the target
    template: str = ""  # the chat template that made the prompts, if one did
    acceptance_rule: str = "sum min(p, q)"  # what beta is
    choices: dict[str, str] = field(default_factory=dict)  # option by group of the configuration
    overrides: list[str] = field(default_factory=list)
    batch_invariant: bool = False  # whether p has the same bits beside any other tokens, so that no tie is excused


def append(file: IO[str], record: Record) -> None:
    """Writes one line and flushes it, so that a kill loses at most the request at hand."""
    file.write(record.line() + "\n")
    file.flush()


@cache
def adapter() -> TypeAdapter[Record]:
    """What reads a line by the types above."""
    return TypeAdapter(Record)


def read(path: Path) -> list[Record]:
    """The records of a file, if it is there, without a last line that a kill cut. Raises ConfigError for others."""
    if not path.exists():
        return []
    lines, found = content(path).split(b"\n"), list[Record]()
    for number, line in enumerate(lines[:-1], 1):
        place = f"{path} line {number}"
        try:
            record = adapter().validate_json(line, strict=True)
        except ValidationError as error:
            raise refused(error, place) from error
        for method in ("speculative", "baseline"):
            text: Text | None = vars(record)[method]
            if text is not None and len({len(column) for column in vars(text.rounds).values()}) > 1:
                raise ConfigError(f"{place} cannot be read: the columns of {method}.rounds must have one length")
        found.append(record)
    return found


def content(path: Path) -> bytes:
    """What a file of a run holds, which a kill may have cut inside a character. Raises ConfigError if it is no file."""
    if not path.is_file():
        what = "is no file" if path.exists() else "is not there"
        raise ConfigError(f"{path} {what}: choose the folder of a finished run")
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({first_line(error)})") from error


def refused(error: ValidationError, place: str) -> ConfigError:
    """What pydantic refused first, with the key, the value and what is allowed."""
    first = error.errors(include_url=False)[0]
    key = ".".join(map(str, first["loc"]))
    if first["type"] in ("json_invalid", "missing"):
        return ConfigError(f"{place} cannot be read: {' '.join(filter(None, (key, first['msg'])))}")
    wanted = first["msg"].removeprefix("Input should be ")
    return ConfigError(f"{place} cannot be read: {key}={shown(first['input'])} is not allowed, it must be {wanted}")
