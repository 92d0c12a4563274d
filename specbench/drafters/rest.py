"""REST (2311.08252): copies what most often followed the text's last tokens in a datastore, which is a text file."""

import contextlib
import hashlib
import logging
import os
import zipfile
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from specbench.data.json_lines import LINES, need_file, read_json_lines
from specbench.data.records import field_of, text_of
from specbench.data.sources import of_tokenizer, place_of
from specbench.data.text_file import TEXT, read_text
from specbench.drafters.lookup_base import PointMassDrafter
from specbench.executors.machine import cache_dir
from specbench.models.context import Context
from specbench.models.language_model import LanguageModel
from specbench.settings import BaseSettings, file_hash, setting

log = logging.getLogger(__name__)
TokenIds = NDArray[np.int32]
END = -1  # in front of each text and behind the last
PIECE = 2**18  # characters that are tokenized at a time
PLACES = 1000  # of a match, at most, whose continuations are compared


class RestDrafter(PointMassDrafter):
    """Guesses, token by token, what most often followed the longest suffix of the text, of `depth` tokens at most, that
    occurs in the datastore, as long as it did so in a share `min_prob` of the places. q is a point mass on each guess.
    Of equally frequent tokens the one with the smallest id is taken."""

    fixed_in_round = True
    beside_ranks = True
    with_encoders = False

    @dataclass
    class Settings(BaseSettings):
        path: str = setting(required="a text file, or with drafter.field a file of JSON lines")
        field: str | None = setting()
        tokens: int = setting(ge=1, le=2**30)
        depth: int = setting(ge=1, le=1000)
        min_prob: float = setting(ge=1e-6, le=1, zero=True)

        def check(self, prefix: str) -> None:
            need_file(place_of(self.path), f"{prefix}path", TEXT if self.field is None else LINES)

        def sources(self) -> Mapping[str, str]:
            return {"path": file_hash(place_of(self.path))}

    def __init__(self, store: "Datastore", min_prob: float):
        self.store, self.min_prob = store, min_prob

    @classmethod
    def from_settings(cls, settings: Any, context: Context, target: LanguageModel) -> "RestDrafter":
        return cls(stored(settings, target.tokenizer), settings.min_prob)

    def guess(self, row: int, tokens: Sequence[int], gamma: int) -> list[int]:
        after, found = self.store.following(tokens, gamma), list[int]()
        least = self.min_prob * len(after)
        for step in range(gamma):
            values, counts = np.unique(after[:, step][after[:, step] != END], return_counts=True)
            if not len(values) or counts.max() < least:
                break
            found.append(int(values[counts.argmax()]))
            after = after[after[:, step] == found[-1]]
        return found


class Datastore:
    """The tokens of texts, backwards, and the order of their places by the `depth` tokens from each on, which are those
    before a place of the text. Both are int32 [n]."""

    def __init__(self, back: TokenIds, order: TokenIds, depth: int):
        self.back, self.order, self.depth = back, order, depth

    def following(self, text: Sequence[int], count: int) -> TokenIds:
        """The tokens [m, count] behind m of the places of the longest suffix of a text that occurs: all, or some at
        equal distances in their order. END, and what comes then, stands where there are no more."""
        wanted, back = list(text[: -self.depth - 1 : -1]), self.back
        at = bisect_left(self.order, wanted, key=lambda place: back[place : place + self.depth].tolist())
        near = (zip(wanted, back[place:], strict=False) for place in self.order[max(0, at - 1) : at + 1])
        same = max(([a for a, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)] for pairs in near), key=len)
        begin = bisect_left(self.order, same, key=lambda place: back[place : place + len(same)].tolist())
        end = bisect_right(self.order, same, key=lambda place: back[place : place + len(same)].tolist())
        places = self.order[begin : end if same else begin : -(-(end - begin) // PLACES)]
        found: TokenIds = back[(places[:, None] - 1 - np.arange(count)).clip(0)]
        return found


def order_of(back: TokenIds, depth: int) -> TokenIds:
    """The places of a sequence [n] in the order of the tokens from each on, `depth` at least (prefix doubling)."""
    rank, width = back.astype(np.int64) + 1, 1
    while width < depth:
        pair = rank * (rank.max() + 1)
        pair[:-width] += rank[width:]
        rank = np.unique(pair, return_inverse=True)[1] + 1
        width *= 2
    return np.argsort(rank, kind="stable").astype(np.int32)


def stored(settings: Any, tokenizer: Any) -> Datastore:
    """The datastore of a file, which is kept on disk for later runs with this tokenizer. Raises ConfigError."""
    known = settings.sources()["path"], settings.field, settings.tokens, settings.depth, of_tokenizer(tokenizer)
    path = cache_dir() / "datastores" / f"{hashlib.sha256(repr(known).encode()).hexdigest()[:24]}.npz"
    with contextlib.suppress(OSError, ValueError, KeyError, zipfile.BadZipFile):
        found = np.load(path)
        return Datastore(found["back"], found["order"], settings.depth)
    back = read_backwards(settings, tokenizer)
    log.info("drafter.path=%s: sorting the places of %d tokens", settings.path, len(back))
    order = order_of(back, settings.depth)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.npz")
        np.savez(temporary, back=back, order=order)
        os.replace(temporary, path)
    return Datastore(back, order, settings.depth)


def read_backwards(settings: Any, tokenizer: Any) -> TokenIds:
    """The first `tokens` tokens of the file, backwards. Raises ConfigError."""
    found, left, console = list[TokenIds](), settings.tokens, Console(stderr=True)
    for text in track(texts_of(settings), "tokenizing drafter.path", console=console, transient=True):
        tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        found.append(np.array([END, *tokens[:left]], dtype=np.int32))
        left -= len(tokens)
        if left < 0:
            log.warning("drafter.path=%s has more than drafter.tokens=%d tokens: the datastore has the first ones",
                        settings.path, settings.tokens)  # fmt: skip
            break
    return np.concatenate([*found, np.array([END], dtype=np.int32)])[::-1].copy()


def texts_of(settings: Any) -> Iterator[str]:
    """The texts of a file: that of a field in each line, or pieces that end where lines do. Raises ConfigError."""
    path, field = place_of(settings.path), settings.field
    if field is not None:
        for number, record in read_json_lines(path, "drafter.path"):
            where = f"drafter.path={path} line {number}"
            yield text_of(field_of(record, field, "drafter.field", where), f"{where} field {field!r}", blank=True)
        return
    text, begin = read_text(path, "drafter.path"), 0
    while begin < len(text):
        end = text.find("\n", begin + PIECE) + 1 or len(text)
        yield text[begin:end]
        begin = end
