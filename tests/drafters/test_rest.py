"""A datastore: against a search that looks at every place, and its file."""

import gzip
import json
import os

import numpy as np
import pytest
import torch
from decoder_cases import DigitTokenizer
from law_cases import AcceptEverything, Law, decode, worst_excess

from specbench.decoding.state import Job, State
from specbench.drafters import rest
from specbench.drafters.rest import END, Datastore, RestDrafter, order_of, stored
from specbench.errors import ConfigError


def store_of(texts, depth):
    back = np.array([*(token for text in texts for token in (END, *text)), END], dtype=np.int32)[::-1].copy()
    return Datastore(back, order_of(back, depth), depth)


def continuations(texts, suffix):
    """What follows each place of a suffix in some texts."""
    return [text[end:] for text in texts for end in range(len(suffix), len(text) + 1)
            if text[end - len(suffix) : end] == suffix]  # fmt: skip


def by_search(texts, text, depth, gamma, min_prob):
    """REST's guess from its definition."""
    for size in range(min(depth, len(text)), 0, -1):
        after = continuations(texts, text[-size:])
        if after:
            break
    found, total = [], len(after)
    while len(found) < gamma:
        step = len(found)
        tokens = [a[step] for a in after if a[:step] == found and len(a) > step]
        if not tokens or max(map(tokens.count, tokens)) < min_prob * total:
            break
        found.append(min(tokens, key=lambda token: (-tokens.count(token), token)))
    return found


@pytest.mark.parametrize("seed", range(8))
def test_a_datastore_finds_what_a_search_finds(seed):
    draws = np.random.default_rng(seed)
    alphabet, depth = int(draws.integers(2, 5)), int(draws.integers(1, 8))
    texts = [draws.integers(alphabet, size=length).tolist() for length in draws.integers(1, 40, size=5)]
    drafter = RestDrafter(store_of(texts, depth), min_prob=0.2)
    unlike = 0
    for _ in range(40):
        text = draws.integers(alphabet + 1, size=int(draws.integers(1, 12))).tolist()  # one token is in no text
        found = drafter.guess(0, text, 4)
        assert found == by_search(texts, text, depth, 4, 0.2)
        unlike += found != by_search(texts, text[:-1] or [END], depth, 4, 0.2)
    assert unlike > 10  # negative control: without the last token


@pytest.mark.parametrize("depth", [1, 3, 16, 64])
def test_places_are_in_the_order_of_what_comes_from_them_on(depth):
    back = np.random.default_rng(depth).integers(-1, 3, size=50).astype(np.int32)
    keys = [back[place : place + depth].tolist() for place in order_of(back, depth)]
    assert keys == sorted(keys)
    assert sorted(order_of(back, depth)) == list(range(50))


def test_of_many_places_some_are_compared(monkeypatch):
    monkeypatch.setattr(rest, "PLACES", 4)
    store = store_of([[1, n] for n in range(2, 9)], 3)
    assert store.following([5, 1], 1)[:, 0].tolist() == [2, 4, 6, 8]
    assert len(store.following([9], 1)) == 0 and len(store.following([], 1)) == 0


def test_the_end_of_the_text_is_looked_up():
    drafter = RestDrafter(store_of([[1, 2, 3, 4]], 2), 0.0)
    state = State.start([Job([9] * 50 + [1, 2], 60, 1)], [], 4, torch.device("cpu"))
    assert drafter.propose(state, [3]).tokens.tolist() == [[3, 4]]


def settings_of(path, **others):
    return RestDrafter.Settings(**{"path": str(path), "field": None, "tokens": 100, "depth": 4, "min_prob": 0} | others)


def forward(store):
    return store.back[::-1].tolist()


def test_a_file_is_tokenized_once(tmp_path, monkeypatch):
    path = tmp_path / "numbers.txt"
    path.write_text("1 2 3\n4 5\n6 7\n")
    monkeypatch.setattr(rest, "PIECE", 4)
    first = stored(settings_of(path), DigitTokenizer())
    assert forward(first) == [END, 1, 2, 3, END, 4, 5, 6, 7, END]
    with monkeypatch.context() as patch:
        patch.setattr(rest, "read_backwards", None)
        again = stored(settings_of(path), DigitTokenizer())
    assert forward(again) == forward(first) and np.array_equal(again.order, first.order)
    path.write_text("7 8")  # another file
    assert forward(stored(settings_of(path), DigitTokenizer())) == [END, 7, 8, END]
    for file in (rest.cache_dir() / "datastores").iterdir():
        file.write_bytes(b"damaged")
    assert forward(stored(settings_of(path), DigitTokenizer())) == [END, 7, 8, END]


def test_json_lines_are_texts_of_their_own(tmp_path, caplog):
    path = tmp_path / "texts.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(json.dumps({"out": f"{n} {n + 1}"}) for n in range(4)).encode()))
    assert forward(stored(settings_of(path, field="out"), DigitTokenizer())) == [
        END, 0, 1, END, 1, 2, END, 2, 3, END, 3, 4, END]  # fmt: skip
    assert forward(stored(settings_of(path, field="out", tokens=5), DigitTokenizer())) == [
        END, 0, 1, END, 1, 2, END, 2, END]  # fmt: skip
    assert "more than drafter.tokens=5 tokens" in caplog.text
    path.write_text(json.dumps({"out": 5}))
    with pytest.raises(ConfigError, match="line 1 field 'out' is a number, not text"):
        stored(settings_of(path, field="out"), DigitTokenizer())
    os.remove(path)


def test_a_verifier_that_accepts_what_was_found_is_caught(few_contexts, number_text):
    """Negative control of the law test."""
    outputs = decode(few_contexts, number_text, "rest", verifier=AcceptEverything, trials=500)
    assert worst_excess(outputs, Law(few_contexts.target)) > 1
