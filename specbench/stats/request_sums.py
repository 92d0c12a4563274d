"""Sums over each request of all that a run derives ratios from: from its rounds, laps and texts to columns.

A column's name may end in what it counts: see `stats/formulas.py`.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from specbench.decoding.timer import Lap, decoding_seconds
from specbench.stats.bootstrap import cluster_numbers, time_clusters
from specbench.stats.estimates import RECITED, Floats, Integers
from specbench.stats.formulas import (
    ACCEPTED_OF,
    BETA_AT,
    DRAFTS,
    OWN_SECONDS,
    OWN_TOKENS,
    SECONDS_OF,
    TESTED_AT,
    TOKENS_OF,
)
from specbench.stats.lenience_drift import drift_table
from specbench.stats.records import Group, PerRequestSums, Result, Round, RunRecord

ENTROPY_EDGES = (0.0, 0.1, 0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0)  # nats; the last bin is open
CONFIDENCE_BINS = 10  # of equal width, from 0 to 1
WAYS = ("", "plain_")
SHORTEST = 1e-9  # seconds, so that a clock that stood still has a logarithm
CLASSES = ("word", "number", "punctuation", "whitespace", "special", "other")
UNKNOWN = "\ufffd"  # what bytes that are no character decode to
Bytes = Callable[[float, float], float]  # bytes that so many calls read, with so many columns in all

# Columns that are sums over rounds. A call's steps, seconds and itself are split evenly among the rows that it served.
OF_ROUND: Mapping[str, Callable[[Round], float]] = {
    **{name: attrgetter(name) for name in ("accepted", "tested", "recovered", "bonus", "accepted_before_stop")},
    "beta": lambda r: sum(r.beta),
    "rounds": lambda r: 1,
    "drafted": attrgetter("gamma"),
    "verified": attrgetter("width"),
    "steps": lambda r: r.steps / r.rows,
    "calls": lambda r: 1 / r.rows,
    "draft_seconds": lambda r: r.seconds.get(Lap.DRAFT, 0.0) / r.rows,
    "verify_seconds": lambda r: r.seconds.get(Lap.VERIFY, 0.0) / r.rows,
}
OF_PLAIN_ROUND = {"plain_calls": OF_ROUND["calls"], "plain_step_seconds": OF_ROUND["verify_seconds"]}


class Tokens:
    """A vocabulary: its size, and the class of each token."""

    def __init__(self, tokenizer: Any, size: int):
        self.size = size
        self._decode: Callable[..., str] = tokenizer.decode
        self._special = frozenset(getattr(tokenizer, "all_special_ids", ()))
        self._known: dict[int, str] = dict.fromkeys(self._special, "special")

    def class_of(self, token: int) -> str:
        """One of CLASSES. A token is decoded alone, so one that is a part of a character is "other"."""
        if token not in self._known:
            self._known[token] = class_of_text(self._decode([token], skip_special_tokens=False))
        return self._known[token]


def class_of_text(text: str) -> str:
    """The class of a text, without whitespace around it: "word" has letters, as identifiers and parts of words have,
    perhaps with digits, underscores or apostrophes; "number" has digits; "punctuation" neither; "other" is a mixture,
    or no text."""
    bare = text.strip()
    if not bare:
        return "whitespace" if text else "other"
    if UNKNOWN in bare:
        return "other"
    if any(map(str.isalpha, bare)) and all(c.isalnum() or c in "_'\u2019" for c in bare):
        return "word" if not bare[0].isdigit() else "other"
    if not any(map(str.isalnum, bare)):
        return "punctuation"
    return "number" if all(c.isnumeric() or c in ".,_" for c in bare) else "other"


def request_sums(
    record: RunRecord,
    batch_size: int,
    by_beta: bool,
    target: Bytes,
    drafter: Bytes | None = None,
    tokens: Tokens | None = None,
) -> PerRequestSums:
    """The sums of every finished request of a run, and its clusters. `by_beta` and `tokens` are as for `sums_of`;
    `target` and `drafter` say what calls with one token read (None: no drafter that is one model)."""
    requests = [result.request for result in record.results]

    def rows() -> Iterator[dict[str, float]]:
        for group in record.groups:
            for result in group.results:
                row = sums_of(result, by_beta, tokens, alone=batch_size == 1)
                yield row | _of_group(group, result, row["plain_calls"], target, drafter)

    return PerRequestSums(
        [request.id for request in requests],
        [request.prompt_id for request in requests],
        [request.category for request in requests],
        cluster_numbers(time_clusters(record, batch_size)),
        [0] * len(requests),
        columns_of_rows(rows(), len(requests)),
    )


def columns_of_rows(rows: Iterable[Mapping[str, float]], count: int) -> dict[str, Floats]:
    """The columns [count] of so many rows. What a row lacks is 0: not every request has drafts of every length."""
    columns: dict[str, Floats] = defaultdict(lambda: np.zeros(count))
    for number, row in enumerate(rows):
        for name, value in row.items():
            columns[name][number] = value
    return dict(columns)


def _of_group(group: Group, result: Result, calls: float, target: Bytes, drafter: Bytes | None) -> dict[str, float]:
    """A request's share of what its group took, its texts, the bytes that its `calls` of plain decoding read, peers."""
    ours, plain = group.speculative, group.baseline
    whole = {
        "prefill_seconds": ours.prefill_seconds,
        "drafter_prefill_seconds": ours.drafter_prefill_seconds,
        "wall_seconds": ours.laps[Lap.WALL],
        "record_seconds": ours.laps[Lap.RECORD],
        "plain_prefill_seconds": plain.prefill_seconds,
        "plain_wall_seconds": plain.laps[Lap.WALL],
    }
    found = {name: seconds / len(group.results) for name, seconds in whole.items()} | _of_texts(result)
    columns = float(sum(r.position + result.request.columns for r in result.baseline.rounds))
    found["plain_bytes"] = target(calls, columns)
    if drafter is not None:  # of as many steps of the drafter
        found["drafter_bytes"] = drafter(calls, columns)
    for name, output in result.outputs.items():
        if output.decoded and output.decode_seconds > 0:  # an answer in one piece tells no time per token
            found |= {f"{SECONDS_OF}{name}": output.decode_seconds, f"{TOKENS_OF}{name}": output.decoded}
            own = result.speculative
            found |= {f"{OWN_SECONDS}{name}": own.seconds, f"{OWN_TOKENS}{name}": len(own.tokens)}
    return found


def sums_of(
    result: Result, by_beta: bool = True, tokens: Tokens | None = None, alone: bool = False
) -> dict[str, float]:
    """The sums of one request; times in seconds. `by_beta` says whether the verifier accepts a guess with probability
    beta; if not, nothing is known of luck. Without `tokens` those of classes and entropies are left out. `alone`: no
    call of it served another one."""
    ours, plain = result.both
    rounds, plain_rounds, decoded = [*ours.rounds], [*plain.rounds], len(ours.tokens)
    found: dict[str, float] = defaultdict(float)
    found |= {name: sum(map(of, rounds)) for name, of in OF_ROUND.items()}
    found |= {name: sum(map(of, plain_rounds)) for name, of in OF_PLAIN_ROUND.items()}
    found |= {
        "requests": 1.0,
        "tokens": decoded,
        "prompt_tokens": result.request.prompt_tokens,
        "tokens_per_round": decoded / max(1, len(rounds)),
        "recited": recited([*_encoded(result), *result.request.tokens], ours.tokens),
        "stops": decoded < result.limit,
        "expected": decoded - found["accepted"] + found["beta" if by_beta else "accepted"],  # tokens, without luck
        "seconds": ours.seconds,
        "plain_tokens": len(plain.tokens),
        "plain_seconds": plain.seconds,
        "log_speedup": log_speedup(result),
        "beta_variance": sum(beta * (1 - beta) for r in rounds for beta in r.beta),
    }
    for r in rounds:
        found[f"{DRAFTS}{r.gamma}"] += 1
        found[f"{ACCEPTED_OF}{r.accepted}"] += 1
        for place, beta in enumerate(r.beta):
            found[f"{BETA_AT}{place}"] += beta
            found[f"{TESTED_AT}{place}"] += 1
    kinds = (_of_calls(result, alone), _of_classes(result, rounds, tokens), _by_entropy(result, rounds, tokens),
             _by_confidence(result, rounds))  # fmt: skip
    for name, value in chain(*kinds):
        found[name] += value
    return dict(found)


def _encoded(result: Result) -> Sequence[int]:
    """The tokens that an encoder read: of an encoder-decoder these are the prompt."""
    read = result.request.encoder_input
    return read if isinstance(read, Sequence) else ()


def recited(prompt: Sequence[int], new: Sequence[int]) -> int:
    """How many new tokens are the last of RECITED in a row that stand earlier in prompt or text."""
    text, found, known = [*prompt, *new], 0, set[tuple[int, ...]]()
    for end, run in enumerate(zip(*(text[i:] for i in range(RECITED)), strict=False), RECITED):
        found += end > len(prompt) and run in known
        known.add(run)
    return found


def log_speedup(result: Result) -> float:
    """The logarithm of plain decoding's seconds per token over ours."""
    ours, plain = (max(decoded.seconds, SHORTEST) / len(decoded.tokens) for decoded in result.both)
    return math.log(plain / ours)


Added = Iterator[tuple[str, float]]  # names of columns, and what is added to each


def _of_calls(result: Result, alone: bool) -> Added:
    """Seconds of whole calls, for which each row waits, and by the power of two of the rows that a call served."""
    for way, decoded in zip(WAYS, result.both, strict=True):
        if alone:
            yield f"{way}call_seconds", decoded.seconds
            continue
        for r in decoded.rounds:
            whole, rows = decoding_seconds(r.seconds), 1 << (r.rows - 1).bit_length()
            yield f"{way}call_seconds", whole
            yield f"{way}tokens rows {rows}", r.tokens
            yield f"{way}seconds rows {rows}", whole / r.rows
            yield f"{way}call_seconds rows {rows}", whole


def _of_classes(result: Result, rounds: list[Round], tokens: Tokens | None) -> Added:
    """Tested and accepted guesses by the class of the guess."""
    if tokens is None:
        return
    for r in rounds:
        for i in range(r.tested):
            accepted = i < r.accepted
            guess = result.speculative.tokens[r.position + i] if accepted else r.rejected
            if guess is not None:  # None: the verdict came from outside
                name = tokens.class_of(guess)
                yield f"tested class {name}", 1
                yield f"accepted class {name}", accepted


def _of_texts(result: Result) -> dict[str, float]:
    """Betas along plain decoding's text, and drift at tested positions of ours: 0 where the texts were not read."""
    beta = np.zeros(0) if result.baseline_laws is None else result.baseline_laws.beta
    beta = beta[np.isfinite(beta)]
    tv, kl, _ = table = drift_table(result)
    found = {"text_beta": beta.sum(), "text_tested": len(beta)}
    return found | {"drift_tv": tv.sum(), "drift_kl": kl.sum(), "drift_tested": table.shape[1]}


def _tested(rounds: list[Round]) -> tuple[Integers, npt.NDArray[np.bool_]]:
    """Of each tested guess the position in the text [n], and whether it was accepted [n]."""
    places = [(r.position + i, i < r.accepted) for r in rounds for i in range(r.tested)]
    table = np.array(places, np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1].astype(bool)


def _by_entropy(result: Result, rounds: list[Round], tokens: Tokens | None) -> Added:
    """Tested and accepted guesses and their betas by entropy, of both models."""
    laws = result.speculative_laws
    if laws is None or tokens is None:
        return
    where, accepted = _tested(rounds)
    betas = np.array([beta for r in rounds for beta in r.beta])
    for model, relative in (("drafter", laws.relative_entropy), ("target", laws.target_entropy)):
        entropy = relative[where] * math.log(tokens.size)
        known = np.isfinite(entropy)
        bins = np.digitize(entropy[known], ENTROPY_EDGES) - 1
        yield from _of_bins(f"{model} entropy", bins, tested=None, accepted=accepted[known], beta=betas[known])


def _by_confidence(result: Result, rounds: list[Round]) -> Added:
    """By the drafter's largest probability: along plain decoding's text that probability and p there, and tested and
    accepted guesses of ours."""
    if (laws := result.baseline_laws) is not None:
        known = np.isfinite(laws.confidence)
        confidence, agreement = laws.confidence[known], laws.agreement[known]
        yield from _of_bins(
            "confidence", confidence_bin(confidence), positions=None, sum=confidence, agreement=agreement
        )
    if (laws := result.speculative_laws) is not None:
        where, accepted = _tested(rounds)
        confidence = laws.confidence[where]
        known = np.isfinite(confidence)
        yield from _of_bins("confidence", confidence_bin(confidence[known]), tested=None, accepted=accepted[known])


def confidence_bin(confidence: Floats) -> Integers:
    """The number of the bin of each probability [n]; 1 is in the last one."""
    bins: Integers = np.minimum((confidence * CONFIDENCE_BINS).astype(np.int64), CONFIDENCE_BINS - 1)
    return bins


def _of_bins(what: str, bins: Integers, **values: npt.NDArray[Any] | None) -> Added:
    """The sums of values [n] over each bin that is not empty, and of ones where they are None; bins [n]."""
    for name, own in values.items():
        for number, value in enumerate(np.bincount(bins, own).tolist()):
            if value:
                yield f"{name} {what} {number}", value
