"""The record of a request: one line of `prompts.jsonl`. Every number of a run is computed from these lines and `Facts`.

A request is one turn of a prompt. Lists of `Rounds` have one entry per round; all times are seconds.
"""

import json
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Self

SCHEMA_VERSION = 2  # of the names in results.json


@dataclass
class Rounds:
    """The rounds of one request as columns. Plain decoding is recorded as rounds without a draft."""

    gamma: list[int] = field(default_factory=list)  # depth of the draft
    drafted: list[int] = field(default_factory=list)  # guesses in it; of a tree, its nodes
    tested: list[int] = field(default_factory=list)  # steps that were tested, none beyond a stop
    accepted: list[int] = field(default_factory=list)  # guesses that were accepted and kept
    tokens: list[int] = field(default_factory=list)  # tokens kept, recovered or bonus token included
    recovered: list[int] = field(default_factory=list)  # 1 if a recovered token was kept
    bonus: list[int] = field(default_factory=list)  # 1 if a bonus token was kept
    steps: list[int] = field(default_factory=list)  # drafter steps of the call, for all of its rows together
    rows: list[int] = field(default_factory=list)  # rows that the call served
    width: list[int] = field(default_factory=list)  # tokens of each row that the target's call read
    lenience: list[float] = field(default_factory=list)
    draft: list[float] = field(default_factory=list)  # seconds of the whole call in the drafter
    verify: list[float] = field(default_factory=list)  # in the target
    accept: list[float] = field(default_factory=list)  # in the verifier
    host: list[float] = field(default_factory=list)  # in Python between the calls
    betas: list[list[float]] = field(default_factory=list)  # beta of each tested step

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, **values: Any) -> None:
        """Appends one round: a value for each column. Raises TypeError if a column is missing or unknown."""
        if values.keys() != vars(self).keys():
            raise TypeError(f"a round has the columns {', '.join(vars(self))}, not {', '.join(values)}")
        for name, value in values.items():
            getattr(self, name).append(value)


@dataclass
class Text:
    """What one method of decoding made of a request."""

    ids: list[int]  # new tokens
    text: str
    seconds: float  # of decoding: each call's seconds are split evenly among the rows that it served
    prefill_seconds: float  # the target read the prompt
    drafter_prefill_seconds: float  # the drafter read the prompt
    record_seconds: float  # measuring, which is no part of the other times
    rounds: Rounds
    times: dict[str, float] | None = None  # arrived, admitted, first_token, finished; only if requests arrive over time


@dataclass
class Record:
    """One request, decoded by all methods."""

    id: str
    prompt_id: str
    turn: int  # of the prompt, from 0
    category: str
    process: int  # number of the process among repeats, else 0
    group: int  # requests that were decoded together have one number
    prompt: str
    prompt_tokens: int
    encoder_tokens: int | None  # tokens that an encoder read
    limit: int  # the largest number of new tokens
    reference: str | None
    speculative: Text | None  # None if it failed, as is `baseline`
    baseline: Text | None
    peers: dict[str, dict[str, Any]] = field(default_factory=dict)  # {"tokens", "seconds", "text", "ids"} or {"error"}
    target_text: dict[str, float] | None = None  # sum of `beta` and number of `positions` along plain decoding's text
    drift: dict[str, float] | None = None  # of lossy runs: sums of `tv` and `kl`, largest `bound`, and `positions`
    verdict: dict[str, Any] | None = None  # sums of the verdict's reading; None if the text was not read
    search: dict[str, Any] | None = None  # what `decoding=beam` keeps
    failed: str | None = None  # the error, in one sentence

    def line(self) -> str:
        """The record as JSON in one line, without the newline."""
        return json.dumps(vars(self), default=vars, ensure_ascii=False)

    @classmethod
    def of_line(cls, line: str) -> Self:
        """The record of a line. Raises ValueError, KeyError or TypeError if the line is not one."""
        values = json.loads(line)
        for method in ("speculative", "baseline"):
            text = values[method]
            if text is not None:
                values[method] = Text(**text | {"rounds": Rounds(**text["rounds"])})
        return cls(**values)


@dataclass
class Facts:
    """What results need beside the records of a run. They are stored in `results["details"]["facts"]`."""

    name: str
    config: dict[str, Any]
    provenance: dict[str, Any]
    gamma: int | None = None  # of a fixed policy, else None
    greedy: bool = False  # temperature 0
    expected_lossless: bool = True
    lossy_reason: str = ""
    batch_size: int = 1
    c_hat: float | None = None  # operations of a drafter step over those of a target step (Definition 3.10)
    step_bytes: float = 0.0  # weights that a target step reads
    column_bytes: float = 0.0  # keys and values of one token
    peak_bytes_per_second: float = 0.0  # that the memory was measured to read; 0 if it was not measured
    memory: dict[str, Any] = field(default_factory=dict)  # peak_bytes, weights_bytes, kv_bytes
    seconds: dict[str, float] = field(default_factory=dict)  # start, load, warm_up, plain, speculative, peers, ...
    too_long: int = 0  # requests that leave no room for a token in the context
    drafter_context: int | None = None  # the longest text that the drafter can read, tokens; None if any
    begin: int | None = None  # tokens that every text begins with, None if these are its prompt's
    status: str = "complete"
    notes: list[str] = field(default_factory=list)
    template: str = ""  # the chat template that made the prompts, if one did
    acceptance_rule: str = "sum min(p, q)"  # what beta is
    choices: dict[str, str] = field(default_factory=dict)  # option by group of the configuration
    overrides: list[str] = field(default_factory=list)


def append(file: IO[str], record: Record) -> None:
    """Writes one line and flushes it, so that a kill loses at most the request at hand."""
    file.write(record.line() + "\n")
    file.flush()


def read(path: Path) -> list[Record]:
    """The records of a file; none if it does not exist. A line that a kill cut is dropped."""
    found: list[Record] = []
    if path.is_file():
        with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
            for line in file:
                with suppress(ValueError, KeyError, TypeError):
                    if line.endswith("\n"):
                        found.append(Record.of_line(line))
    return found
