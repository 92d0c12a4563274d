"""Named data sets, plain text and aligned text; every test makes its own small files."""

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest
from small_runs import composed

from specbench.config.check import check
from specbench.config.compose import conf_dir
from specbench.data.prompts import Prompt, load
from specbench.data.records import MT_BENCH
from specbench.errors import ConfigError

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
    found = prompts_of("data=text", f"data.path={path}", "data.window=4")
    assert [(p.id, p.turns[0], p.category) for p in found] == [("a.txt:0", "abcd", ""), ("a.txt:4", "efgh", "")]
    assert [p.turns[0] for p in prompts_of("data=text", f"data.path={path}")] == ["abcdefghij"]  # shorter than one
    (tmp_path / "b.md").write_text("\n\nstory\n\nmore of it\n")  # a blank line ends nothing
    both = prompts_of("data=text", f"data.path={tmp_path}")
    assert [(p.category, p.turns[0]) for p in both] == [("a.txt", "abcdefghij"), ("b.md", "\n\nstory\n\nmore of it\n")]
    (tmp_path / "none").mkdir()
    with pytest.raises(ConfigError, match="has no text files"):
        prompts_of("data=text", f"data.path={tmp_path / 'none'}")


def test_aligned_text(tmp_path):
    source, reference = tmp_path / "s.en", tmp_path / "s.de"
    source.write_text("one\n\nthree\u2028still three\n")
    reference.write_text("eins\nzwei\ndrei\n")
    words = ["data=parallel", f"data.path={source}", f"data.reference={reference}"]
    assert [(p.id, p.turns[0]) for p in prompts_of(*words)] == [("1", "one"), ("3", "three\u2028still three")]
    told = prompts_of(*words, "data.template='English: {source} German:'")
    assert told[0].turns == ("English: one German:",)
    with pytest.raises(ConfigError, match=r"must be one of .source., .reference."):
        prompts_of(*words, "data.template='{text}'")
    reference.write_text("eins\n")
    with pytest.raises(ConfigError, match="has 1 lines, and data"):
        prompts_of(*words)


@pytest.mark.parametrize(("line", "said"), [
    ("[1]", "line 1"), ("{", "line 1"), ("\xff", "line 1 is not UTF-8"), ('{"prompt": NaN}', "NaN"), ("", "is empty"),
    (" ", "blank"), ('{"other": "x"}', "has no field 'prompt'"), ('{"prompt": ["x"]}', "a list, not text"),
    ('{"prompt": " "}', "is empty"), ('{"prompt": "\\ud800"}', "surrogate"),
])  # fmt: skip
def test_a_file_that_is_damaged_is_one_sentence(line, said, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(line.encode("latin-1"))
    with pytest.raises(ConfigError, match=said) as error:
        prompts_of("data=jsonl", f"data.path={path}")
    assert f"data.path={path}" in str(error.value)
    path.write_bytes(gzip.compress(b'{"prompt": "x"}' * 99)[:-9])
    with pytest.raises(ConfigError, match="cannot be read after line"):
        prompts_of("data=jsonl", f"data.path={path}")
