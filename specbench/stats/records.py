"""Records of what was decoded: raw counts and times, by round, by request and by group of requests."""

import pickle
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, overload

import numpy as np

from specbench.data.prompts import Request
from specbench.decoding.timer import DECODING, KEPT, READING, Laps, decoding_seconds
from specbench.stats.estimates import Floats
from specbench.stats.verdict_records import DrawnFrom

WAITED = (*DECODING, *READING)  # what a row waits for between its tokens


@dataclass
class RequestTimes:
    """When a request arrived, got a row, and got its first and last token: seconds since decoding began."""

    arrived: float
    admitted: float
    first_token: float
    finished: float


@dataclass
class Round:
    """One round of one request. Positions count from the first generated token; `seconds` are seconds by lap."""

    row: int  # the request's index among those decoded together
    position: int
    gamma: int  # tokens drafted; of a tree, its depth
    accepted: int  # accepted by the verifier, and not cut off by a stop
    tested: int  # guesses tested, none beyond a stop
    tokens: int  # tokens emitted
    recovered: int  # 1 if a recovered token was emitted
    bonus: int  # 1 if a bonus token was emitted
    accepted_before_stop: int  # accepted by the verifier, also beyond a stop
    beta: list[float]  # of each tested position
    rejected: int | None = None  # the guess that was rejected
    numbers: dict[str, tuple[float, ...]] = field(default_factory=dict)  # by metric
    seconds: Laps = field(default_factory=dict)  # of all rows together
    rows: int = 1  # rows that took part in the call
    steps: int = 0  # drafter steps of all rows together: the longest draft among them
    lenience: float = 1.0
    width: int = 1  # tokens of each row that the target's call read
    call: int = 0  # number of the target's call among those of its group


class Rounds(Sequence[Round]):
    """The rounds of one request, compressed: a run may have millions of them. Of the seconds only `KEPT` are stored."""

    def __init__(self, rounds: Sequence[Round]):
        self._count = len(rounds)
        kept = [vars(r) | {"seconds": {lap: s for lap, s in r.seconds.items() if lap in KEPT}} for r in rounds]
        self._packed = zlib.compress(pickle.dumps([tuple(values.values()) for values in kept]), 1)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Round: ...
    @overload
    def __getitem__(self, index: slice) -> list[Round]: ...
    def __getitem__(self, index: int | slice) -> Round | list[Round]:
        return list(self)[index]

    def __iter__(self) -> Iterator[Round]:
        return (Round(*values) for values in pickle.loads(zlib.decompress(self._packed)))


def call_seconds(rounds: Sequence[Round]) -> Floats:
    """Seconds of the whole call of each round, and of the prompts that were read before it: [rounds]."""
    return np.array([sum(s for lap, s in r.seconds.items() if lap in WAITED) for r in rounds], float)


@dataclass
class DecodedRequest:
    """One request, decoded one way."""

    tokens: Sequence[int]  # generated tokens
    rounds: Sequence[Round]
    times: RequestTimes | None = None  # only if requests arrive over time
    search: Any = None  # what the group `decoding` keeps of a search that found `tokens`

    @cached_property
    def seconds(self) -> float:
        """Decoding time of the request in seconds: each call is split evenly among the rows that it served."""
        return sum(decoding_seconds(r.seconds) / r.rows for r in self.rounds)

    def outcomes(self) -> list[int | None]:
        """For each new token: 1 for an accepted guess, 0 for the token in the place of a rejected one, None if no guess
        was tested."""
        found: list[int | None] = []
        for r in self.rounds:
            found += [1] * r.accepted + [0 if r.recovered else None] * (r.tokens - r.accepted)
        return found

    def lenience(self) -> list[float]:
        """The lenience of each new token."""
        return [r.lenience for r in self.rounds for _ in range(r.tokens)]


@dataclass
class DecodeResult:
    """Some requests, decoded one way."""

    requests: list[DecodedRequest]
    calls: int  # of the target
    laps: Laps  # seconds of all calls together
    prefill_seconds: float  # of the target, and of the drafter when it reads prompts
    kv_bytes: int
    drafter_prefill_seconds: float = 0.0  # the drafter's part of them
    evidence: Sequence[DrawnFrom] = ()  # of each request, until its texts were read
    # Of a mixture-of-experts target, by tokens of a call: calls, and distinct experts of all their layers.
    woken: dict[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def rounds(self) -> list[Round]:
        """The rounds of all requests, in the order of decoding."""
        return sorted((r for request in self.requests for r in request.rounds), key=lambda r: (r.call, r.row))

    @property
    def decode_seconds(self) -> float:
        return decoding_seconds(self.laps)


@dataclass(frozen=True)
class PositionStats:
    """p and q along a text: arrays [tokens], not a number where the drafter had no guess."""

    beta: Floats  # sum_x min(p / l, q) with lenience l (Theorem 3.5, A.5)
    acceptance: Floats  # of a guess, given the token that stands there
    relative_entropy: Floats  # H(q) / log V; of q before argmax at temperature 0
    confidence: Floats  # max q, likewise
    drift_tv: Floats  # total variation between the output distribution s of a tested position and p
    drift_kl: Floats  # KL(s | p), nats; at temperature 0, log p lost against the argmax
    bound: Floats  # max_x s(x) l / p(x), at most 1 (A.5); at temperature 0, max p l / p(x), likewise
    agreement: Floats  # p of the token with the largest q
    target_entropy: Floats  # H(p) / log V; of p before argmax at temperature 0


@dataclass
class Result:
    """One request, decoded every way."""

    request: Request
    limit: int  # the largest number of new tokens
    speculative: DecodedRequest
    baseline: DecodedRequest
    peers: dict[str, Any] = field(default_factory=dict)  # by name a `PeerOutput`, or the error of one that has none
    speculative_laws: PositionStats | None = None  # along both texts, if they were read
    baseline_laws: PositionStats | None = None
    reading: Any = None  # by the stock module, if it was read: a `ReferenceScore`, or what `Decoding.score` returns

    @property
    def outputs(self) -> dict[str, Any]:
        """The output of each peer that has one."""
        return {name: output for name, output in self.peers.items() if not isinstance(output, RuntimeError)}

    @property
    def both(self) -> tuple[DecodedRequest, DecodedRequest]:
        """The request decoded speculatively, and plainly."""
        return self.speculative, self.baseline


@dataclass
class Group:
    """Requests that were decoded one way and then the other."""

    results: list[Result]
    speculative: DecodeResult
    baseline: DecodeResult
    rate: float | None = None  # requests per second, if they arrive over time at one

    def compact(self) -> None:
        """Stores rounds and tokens in arrays, once nobody changes them any more, and drops the evidence."""
        self.speculative.evidence = self.baseline.evidence = ()
        for result in self.results:
            read = result.request.encoder_input
            if read is not None:
                read = array("i", read)
            result.request = replace(result.request, tokens=array("i", result.request.tokens), encoder_input=read)
            for decoded in result.both:
                if isinstance(decoded.rounds, Rounds):  # runs that share plain decoding have this in common
                    continue
                decoded.rounds, decoded.tokens = Rounds(decoded.rounds), array("i", decoded.tokens)


@dataclass
class PerRequestSums:
    """Sums over each finished request, by name [requests], and what the request belongs to."""

    requests: list[str] = field(default_factory=list)  # ids
    prompts: list[str] = field(default_factory=list)  # ids
    categories: list[str] = field(default_factory=list)
    clusters: list[int] = field(default_factory=list)  # numbers of those whose times have something in common
    processes: list[int] = field(default_factory=list)  # numbers, of several processes on the same prompts
    columns: dict[str, Floats] = field(default_factory=dict)

    def only(self, where: Sequence[int]) -> "PerRequestSums":
        """The sums of the requests with these numbers."""
        lists: dict[str, Any] = {n: [own[i] for i in where] for n, own in vars(self).items() if n != "columns" and own}
        return PerRequestSums(**lists, columns={n: column[list(where)] for n, column in self.columns.items()})

    def by_process(self) -> "list[PerRequestSums]":
        """The sums of each process."""
        return [self.only([i for i, own in enumerate(self.processes) if own == number])
                for number in sorted({*self.processes})] or [self]  # fmt: skip


@dataclass
class Failure:
    """Requests that could not be decoded, and the error."""

    requests: Sequence[Request]
    error: str
    memory: bool = False  # whether memory ran out


@dataclass
class RunRecord:
    """Everything that a run decoded."""

    groups: list[Group] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    too_long: int = 0  # requests that leave no room for a token in the context
    columns: dict[str, tuple[str, ...]] = field(default_factory=dict)  # names of the numbers of each metric
    notes: list[str] = field(default_factory=list)  # on how it went
    unread: str = ""  # why some texts were not read again
    unreadable: bool = False  # whether one of the reasons is an error
    sums: PerRequestSums = field(default_factory=PerRequestSums)  # when the run is over

    @property
    def results(self) -> list[Result]:
        return [result for group in self.groups for result in group.results]
