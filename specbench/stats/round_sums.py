"""Sums over one request by what its rounds were: accepted guesses, classes of tokens, entropies, confidence, rows.

A column's name ends in what it counts: a number of guesses, a class of tokens, the number of a bin.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from specbench.decoding.timer import decoding_seconds
from specbench.stats.estimates import Floats, Integers
from specbench.stats.records import PositionStats, Result, Round

ACCEPTED_OF = "accepted of "  # and a number: rounds that accepted so many guesses
TESTED_CLASS, ACCEPTED_CLASS = "tested class ", "accepted class "
MODELS = ("drafter", "target")  # whose entropy
ENTROPY_EDGES = (0.0, 0.1, 0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0)  # nats; the last bin is open
CONFIDENCE_BINS = 10  # of equal width, from 0 to 1
WAYS = ("", "plain_")
SHORTEST = 1e-9  # seconds, so that a clock that stood still has a logarithm
CLASSES = ("word", "number", "punctuation", "whitespace", "special", "other")
UNKNOWN = "\ufffd"  # what bytes that are no character decode to


class Tokens:
    """A vocabulary: its size, and the class of each token."""

    def __init__(self, tokenizer: Any, size: int):
        self.size = size
        self._decode: Callable[..., str] = tokenizer.decode
        self._special = frozenset(getattr(tokenizer, "all_special_ids", ()))
        self._known: dict[int, str] = {}

    def class_of(self, token: int) -> str:
        """One of CLASSES. A token is decoded alone, so one that is a part of a character is "other"."""
        if token not in self._known:
            text = "" if token in self._special else self._decode([token], skip_special_tokens=False)
            self._known[token] = "special" if token in self._special else class_of_text(text)
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


def round_sums(result: Result, tokens: Tokens | None, alone: bool = False) -> dict[str, float]:
    """The sums of one request; without `tokens` those of classes and entropies are left out. `alone`: no call of it
    served another one."""
    rounds = list(result.speculative.rounds)
    betas = np.array([beta for r in rounds for beta in r.beta])
    found: dict[str, float] = defaultdict(float)
    found |= {"requests": 1.0, "log_speedup": log_speedup(result), "beta_variance": float((betas * (1 - betas)).sum())}
    for r in rounds:
        found[f"{ACCEPTED_OF}{r.accepted}"] += 1
    for way, decoded in zip(WAYS, result.both, strict=True):
        if alone:
            found[f"{way}call_seconds"] = decoded.seconds
            continue
        for r in decoded.rounds:
            whole, rows = decoding_seconds(r.seconds), 1 << (r.rows - 1).bit_length()  # the next power of two
            found[f"{way}call_seconds"] += whole  # each row waits for all of a call
            found[f"{way}tokens rows {rows}"] += r.tokens
            found[f"{way}seconds rows {rows}"] += whole / r.rows
            found[f"{way}call_seconds rows {rows}"] += whole
    if tokens is not None:
        _by_class(found, result, rounds, tokens)
        _by_entropy(found, result.speculative_laws, tested_positions(rounds), betas, math.log(tokens.size))
    _by_confidence(found, result, tested_positions(rounds))
    return dict(found)


def log_speedup(result: Result) -> float:
    """The logarithm of plain decoding's seconds per token over ours."""
    ours, plain = (max(decoded.seconds, SHORTEST) / len(decoded.tokens) for decoded in result.both)
    return math.log(plain / ours)


def tested_positions(rounds: Sequence[Round]) -> tuple[Integers, npt.NDArray[np.bool_]]:
    """Of each tested guess the position in the text [n], and whether it was accepted [n]."""
    places = [(r.position + i, i < r.accepted) for r in rounds for i in range(r.tested)]
    table = np.array(places, np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1].astype(bool)


def _by_class(found: dict[str, float], result: Result, rounds: Sequence[Round], tokens: Tokens) -> None:
    """Tested and accepted guesses by the class of the guess."""
    text = result.speculative.tokens
    for r in rounds:
        for i in range(r.tested):
            accepted = i < r.accepted
            guess = text[r.position + i] if accepted else r.rejected
            if guess is None:  # the verdict came from outside
                continue
            name = tokens.class_of(guess)
            found[f"{TESTED_CLASS}{name}"] += 1
            found[f"{ACCEPTED_CLASS}{name}"] += accepted


def _by_entropy(
    found: dict[str, float],
    laws: PositionStats | None,
    tested: tuple[Integers, npt.NDArray[np.bool_]],
    betas: Floats,
    nats: float,
) -> None:
    """Tested and accepted guesses and their betas by entropy, of both models; `nats` is the largest entropy."""
    if laws is None:
        return
    where, accepted = tested
    for model, relative in zip(MODELS, (laws.relative_entropy, laws.target_entropy), strict=True):
        entropy = relative[where] * nats
        known = np.isfinite(entropy)
        bins = np.digitize(entropy[known], ENTROPY_EDGES) - 1
        count = len(ENTROPY_EDGES)
        _add(found, f"tested {model} entropy", np.bincount(bins, minlength=count))
        _add(found, f"accepted {model} entropy", np.bincount(bins, accepted[known], count))
        _add(found, f"beta {model} entropy", np.bincount(bins, betas[known], count))


def _by_confidence(found: dict[str, float], result: Result, tested: tuple[Integers, npt.NDArray[np.bool_]]) -> None:
    """By the drafter's largest probability: along plain decoding's text that probability and p there, and tested and
    accepted guesses of ours."""
    if (laws := result.baseline_laws) is not None:
        known = np.isfinite(laws.confidence)
        confidence = laws.confidence[known]
        bins = confidence_bin(confidence)
        _add(found, "positions confidence", np.bincount(bins, minlength=CONFIDENCE_BINS))
        _add(found, "sum confidence", np.bincount(bins, confidence, CONFIDENCE_BINS))
        _add(found, "agreement confidence", np.bincount(bins, laws.agreement[known], CONFIDENCE_BINS))
    if (laws := result.speculative_laws) is not None:
        confidence, (where, accepted) = laws.confidence, tested
        known = np.isfinite(confidence[where])
        bins = confidence_bin(confidence[where][known])
        _add(found, "tested confidence", np.bincount(bins, minlength=CONFIDENCE_BINS))
        _add(found, "accepted confidence", np.bincount(bins, accepted[known], CONFIDENCE_BINS))


def confidence_bin(confidence: Floats) -> Integers:
    """The number of the bin of each probability [n]; 1 is in the last one."""
    bins: Integers = np.minimum((confidence * CONFIDENCE_BINS).astype(np.int64), CONFIDENCE_BINS - 1)
    return bins


def _add(found: dict[str, float], name: str, values: npt.NDArray[np.generic]) -> None:
    """The sums of each bin that is not empty, under the name and the bin's number."""
    for number, value in enumerate(values.tolist()):
        if value:
            found[f"{name} {number}"] += value
