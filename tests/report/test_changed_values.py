"""Results of others: one value changed in results.json, comparison.json or prompts.jsonl is a sentence or an answer."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from choosing import slow_unless
from records import records
from stored import stored

from specbench.errors import ConfigError
from specbench.measure.compare import compare as rows_of
from specbench.report import __main__ as command
from specbench.report import figures, files, page
from specbench.run import collect

OTHERS: list[Any] = [None, "text", -1, [], -0.5, 10**400, float("nan"), {}, True, [None], 0, 1e30]
READING = {"tokens": 32, "ended": True, "tested": 30, "rule": "p / q", "wrong": 0, "ties": 0,
           "divergence": "", "p": {"positions": 32, "tv": 1e-6, "limit": 1e-5, "beyond": 0}}  # fmt: skip


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Path:
    """A folder with a comparison of two runs, a and b, of three prompts each."""
    folder = tmp_path_factory.mktemp("pair")
    for name in "ab":
        own = records(3, tokens=6, gamma=2)
        for record in own:
            record.verdict = {**READING}
            record.peers = {"transformers": {"tokens": 6, "seconds": 0.1, "text": "", "ids": [1]}}
        stored(folder / name, own, gamma=2, greedy=True, overrides=[f"drafter={name}"])
    runs = files.read_all(folder)
    rows = rows_of({run.label: run.records for run in runs})
    content = {"schema_version": 2, "kind": "comparison", "rows": rows}
    files.write_text(folder / files.COMPARISON, json.dumps(content))
    return folder


def leaves(tree: Any, keys: tuple = ()) -> Iterator[tuple]:
    """The keys of every value, mappings and lists included; of a list only its first entry's."""
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree[:1]) if isinstance(tree, list) else ()
    for key, value in entries:
        yield (*keys, key)
        yield from leaves(value, (*keys, key))


def changed(tree: Any, keys: tuple, value: Any) -> Any:
    tree = json.loads(json.dumps(tree))
    node = tree
    for key in keys[:-1]:
        node = node[key]
    node[keys[-1]] = value
    return tree


def answers(pair: Path, capsys) -> list[str]:
    """What each command says that reads the folder: a sentence, or "" for an answer. Any other error is a failure."""
    said = []
    for read in (
        lambda: page.write_page(pair),
        lambda: command.print_tables(pair, "csv"),
        lambda: page.write_page(pair / "a"),
        lambda: collect.pool([pair / "a", pair / "b"], pair / "pooled"),
    ):
        try:
            read()
            said.append("")
        except ConfigError as error:
            said.append(str(error))
    for name in ("pooled/results.json", "pooled/prompts.jsonl"):
        (pair / name).unlink(missing_ok=True)
    capsys.readouterr()
    return said


def test_what_nobody_changed_is_an_answer(pair, capsys):
    assert answers(pair, capsys) == [""] * 4


@pytest.mark.parametrize("shift", [slow_unless(shift == 0, shift) for shift in range(len(OTHERS))])
@pytest.mark.parametrize("name", ["a/results.json", "comparison.json", "a/prompts.jsonl"])
def test_one_value_changed_is_a_sentence_or_an_answer(name, shift, pair, capsys, monkeypatch):
    monkeypatch.setattr(figures, "svg", lambda figure: "<svg></svg>")  # drawn they are, and only not written
    path = pair / name
    before = path.read_text()
    first, _, rest = before.partition("\n") if name.endswith("l") else (before, "", "")
    tree, refused = json.loads(first), 0
    try:
        for number, keys in enumerate(leaves(tree)):
            value = OTHERS[(number + shift) % len(OTHERS)]
            path.write_text(json.dumps(changed(tree, keys, value)) + ("\n" + rest if rest else ""))
            for sentence in answers(pair, capsys):
                assert "\n" not in sentence and len(sentence) < 1000
                refused += "cannot be read" in sentence
    finally:
        path.write_text(before)
    assert refused > 20


@pytest.mark.parametrize("name", [files.RESULTS, files.RECORDS])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_what_is_no_file_is_a_sentence(name, kind, pair, tmp_path):
    for own in (files.RESULTS, files.RECORDS):
        (tmp_path / own).write_bytes((pair / "a" / own).read_bytes())
    (tmp_path / name).unlink()
    {"pipe": os.mkfifo, "device": lambda path: path.symlink_to("/dev/zero"), "folder": os.mkdir}[kind](tmp_path / name)
    with pytest.raises(ConfigError, match=f"{name} is no file"):
        page.write_page(tmp_path)
