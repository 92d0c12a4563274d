"""Named data sets, plain text and aligned text; every test makes its own small files."""

import gzip
import hashlib
import json
import logging
import os
import time
from collections import Counter
from pathlib import Path

import pytest
from small_runs import composed, parts_of

from specbench.config.paths import conf_dir
from specbench.config.validate import check
from specbench.data.prompts import Prompt, load, stratify
from specbench.data.records import MT_BENCH
from specbench.data.text import windows
from specbench.errors import ConfigError
from specbench.run.run import run

NAMED = ("spec_bench", "mt_bench", "humaneval", "gsm8k")
CATEGORIES = ["writing", "math", "qa", "rag"]


def prompts_of(*overrides: str) -> list[Prompt]:
    choice = check(composed("logger=none", *overrides)).choices["data"]
    return load(choice.kind.from_settings(choice.settings))


@pytest.fixture
def questions(tmp_path) -> Path:
    """Three questions of each category, one category after the other."""
    lines = [{"question_id": n, "category": CATEGORIES[n // 3], "turns": [f"one {n}", "two"]} for n in range(12)]
    path = tmp_path / "question.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.mark.parametrize("name", NAMED)
def test_a_missing_file_says_where_it_is_to_be_had(name):
    url = next(line.split(": ")[1] for line in (conf_dir() / f"data/{name}.yaml").read_text().splitlines()
               if line.startswith("url: "))  # fmt: skip
    for words, said in (([], "data.path is not set"), (["data.path=no/file"], "data.path=no/file is not there")):
        with pytest.raises(ConfigError) as error:
            check(composed(f"data={name}", *words))
        assert str(error.value).startswith(said) and url in str(error.value)


@pytest.mark.parametrize("word", ["url=0", "url=ftp://a/b", "sha256=abc", f"sha256={'g' * 64}"])
def test_an_address_and_a_hash_are_refused_by_their_names(word, questions):
    for path in ([], [f"data.path={questions}"]):
        with pytest.raises(ConfigError, match=f"^data.{word} is not allowed: it must be (an address|64 hexadecimal)"):
            check(composed("data=mt_bench", f"data.{word}", *path))


def test_another_file_is_a_warning_or_an_error_with_both_hashes(questions, caplog):
    ours = hashlib.sha256(questions.read_bytes()).hexdigest()
    theirs = check(composed("data=spec_bench", f"data.path={questions}", "data.sha256=null")).choices["data"]
    assert theirs.settings.sha256 is None and not caplog.records  # not known: nothing to warn of
    words = ["data=mt_bench", f"data.path={questions}"]
    with caplog.at_level(logging.WARNING):
        check(composed(*words))
        check(composed(*words))
    [record] = caplog.records  # once
    known = check(composed(*words)).choices["data"].settings.sha256
    assert ours in record.message and known in record.message and known != ours
    with pytest.raises(ConfigError, match=ours):
        check(composed(*words, "data.verify=true"))
    check(composed(*words, "data.verify=true", f"data.sha256={ours}"))
    with pytest.raises(ConfigError, match=r"set data\.sha256"):
        check(composed(*words, "data.verify=true", "data.sha256=null"))


@pytest.mark.parametrize("words", ["data=questions", "data=spec_bench data.grouping=own", "data=mt_bench"])
def test_a_limit_takes_as_many_of_each_category(words, questions):
    words = [*words.split(), f"data.path={questions}"]
    found = prompts_of(*words, "data.limit=4")
    assert [prompt.id for prompt in found] == ["0", "3", "6", "9"]  # the first would be 0, 1, 2, 3
    found = prompts_of(*words, "data.limit=6")
    assert Counter(prompt.category for prompt in found) == {"writing": 2, "math": 2, "qa": 1, "rag": 1}
    assert [prompt.id for prompt in found] == ["0", "1", "3", "4", "6", "9"]
    assert len(prompts_of(*words, "data.limit=99")) == 12
    first = prompts_of(*words, "data.limit=2", "data.category=rag")
    assert [(prompt.id, len(prompt.turns)) for prompt in first] == [("9", 2), ("10", 2)]


def test_mt_bench_is_one_category_of_spec_bench(questions):
    found = prompts_of("data=spec_bench", f"data.path={questions}", "data.limit=3")
    assert [(prompt.id, prompt.category) for prompt in found] == [("0", "mt_bench"), ("6", "qa"), ("9", "rag")]
    only = prompts_of("data=spec_bench", f"data.path={questions}", "data.category=mt_bench")
    assert [prompt.id for prompt in only] == [str(n) for n in range(6)] and {"writing", "math"} <= set(MT_BENCH)


def test_stratified_choices_are_those_of_a_count_by_hand():
    made = [Prompt(str(n), ("x",), category) for n, category in enumerate("aaaabbc")]
    for limit, wanted in {1: "a", 2: "ab", 3: "abc", 5: "aabbc", 6: "aaabbc", 7: "aaaabbc"}.items():
        assert "".join(prompt.category for prompt in stratify(made, limit)) == wanted


def test_a_limit_of_many_categories_is_fast():
    """A category for each of 20,000 prompts; with a search among them for each prompt it would take seconds."""
    made, begin = [Prompt(str(n), ("x",), str(n)) for n in range(20000)], time.process_time()
    assert [prompt.id for prompt in stratify(made, 3)] == ["0", "1", "2"]
    assert time.process_time() - begin < 1


def test_records_of_the_named_sets(tmp_path):
    human, math = tmp_path / "h.jsonl.gz", tmp_path / "g.jsonl"
    human.write_bytes(gzip.compress(json.dumps({"task_id": "HumanEval/0", "prompt": "def f():"}).encode()))
    math.write_text(json.dumps({"question": "1 + 1?", "answer": "2"}))
    assert [p.turns for p in prompts_of("data=humaneval", f"data.path={human}")] == [("def f():",)]
    assert [p.turns for p in prompts_of("data=gsm8k", f"data.path={math}")] == [("Question: 1 + 1?\nAnswer:",)]


def test_gzipped_lines_templates_and_categories(tmp_path):
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(f'{{"question": "{n}?", "kind": "k"}}' for n in range(3)).encode()))
    words = ["data.template='Q: {question}'", "data.category_field=kind", "data.limit=2"]
    found = prompts_of("data=jsonl", f"data.path={path}", *words)
    assert [(p.turns[0], p.category) for p in found] == [("Q: 0?", "k"), ("Q: 1?", "k")]


def test_a_local_hub_data_set(tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "test.jsonl").write_text('{"q": "one"}\n{"q": "two"}\n')
    words = ["data=hub", "data.field=q"]
    assert [p.turns[0] for p in prompts_of(*words, f"data.path={tmp_path / 'set'}")] == ["one", "two"]
    with pytest.raises(ConfigError, match=r"data\.path=.*could not be loaded"):
        prompts_of(*words, f"data.path={tmp_path / 'none'}")


def test_text_comes_in_windows(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("abcdefghij")
    found = prompts_of("data=text", f"data.path={path}", "data.window=4", "data.stride=3")
    assert [(p.id, p.turns[0], p.category) for p in found] == [
        ("a.txt:0", "abcd", ""), ("a.txt:3", "defg", ""), ("a.txt:6", "ghij", "")]  # fmt: skip
    assert [p.turns[0] for p in prompts_of("data=text", f"data.path={path}", "data.window=4")] == ["abcd", "efgh"]
    assert [p.turns[0] for p in prompts_of("data=text", f"data.path={path}")] == ["abcdefghij"]  # shorter than one
    (tmp_path / "b.md").write_text("\n\nstory\n\nmore of it\n")  # a blank line ends nothing
    both = prompts_of("data=text", f"data.path={tmp_path}")
    assert [(p.category, p.turns[0]) for p in both] == [("a.txt", "abcdefghij"), ("b.md", "\n\nstory\n\nmore of it\n")]
    assert [*windows(10, 4, 3)] == [(0, 4), (3, 7), (6, 10)] and [*windows(9, 4, 5)] == [(0, 4), (5, 9)]
    (tmp_path / "a.md").write_text("x")  # files of one stem are two categories
    assert [p.category for p in prompts_of("data=text", f"data.path={tmp_path}")] == ["a.md", "a.txt", "b.md"]
    (tmp_path / "none").mkdir()
    with pytest.raises(ConfigError, match="has no text files"):
        prompts_of("data=text", f"data.path={tmp_path / 'none'}")


@pytest.mark.parametrize("name", [b"a\x1b[2J.txt", b"a\xff.txt", b"x" * 210 + b".txt"])
def test_names_of_files_that_are_no_ids_are_refused_before_they_are_read(name, tmp_path):
    (tmp_path / os.fsdecode(name)).write_text("text")
    with pytest.raises(
        ConfigError, match=r"^the name of a file of data\.path=.* must be .* 1 to 200 characters"
    ) as error:
        check(composed("data=text", f"data.path={tmp_path}"))
    assert str(error.value).encode() and "\x1b" not in str(error.value)


def test_windows_of_tokens_are_cut_where_tokens_end(tmp_path):
    from transformers import AutoTokenizer

    from specbench.data.sources import SHIPPED

    path, tokenizer = tmp_path / "a.py", AutoTokenizer.from_pretrained(SHIPPED / "target")
    path.write_text("def add(self, left, right):\n    return left + right\n" * 8)
    found = prompts_of("data=text", f"data.path={path}", "data.unit=tokens", "data.window=16")
    assert "".join(p.turns[0] for p in found) == path.read_text()[: sum(len(p.turns[0]) for p in found)]
    ids = tokenizer(path.read_text(), add_special_tokens=False)["input_ids"]
    assert len(found) == len(ids) // 16
    assert [tokenizer.decode(ids[n * 16 : n * 16 + 16]) for n in range(len(found))] == [p.turns[0] for p in found]
    with pytest.raises(ConfigError, match=r"data\.tokenizer=no/such"):
        prompts_of("data=text", f"data.path={path}", "data.unit=tokens", "data.tokenizer=no/such")


def test_aligned_text(tmp_path):
    source, reference = tmp_path / "s.en", tmp_path / "s.de"
    source.write_text("one\n\nthree\u2028still three\n")
    reference.write_text("eins\nzwei\ndrei\n")
    words = ["data=parallel", f"data.path={source}", f"data.reference={reference}"]
    assert [(p.id, p.turns[0]) for p in prompts_of(*words)] == [("1", "one"), ("3", "three\u2028still three")]
    told = prompts_of(*words, "data.template='English: {source} German:'")
    assert told[0].turns == ("English: one German:",)
    with pytest.raises(ConfigError, match=r"must be .source. or .reference."):
        prompts_of(*words, "data.template='{text}'")
    reference.write_text("eins\n")
    with pytest.raises(ConfigError, match="has 1 lines, and data"):
        prompts_of(*words)


def test_prompts_that_do_not_fit_are_told_of_and_counted(good, tmp_path, caplog):
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"prompt": "x " * 5000}) + "\n" + json.dumps({"prompt": "x = 1"}))
    words = ["data=jsonl", f"data.path={path}", f"target.path={good}", "drafter=random", "executor=eager"]
    with caplog.at_level(logging.WARNING):
        result, _ = run(parts_of(*words, "verdict_tokens=0", "max_new_tokens=4"), tmp_path)
    assert (result.counts.prompts, result.counts.too_long) == (1, 1)
    [told] = [record.getMessage() for record in caplog.records if "not fit" in record.getMessage()]
    assert told.startswith("1 request does not fit the ")
