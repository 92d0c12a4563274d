"""SPEED-Bench's questions, and aiperf's file of messages."""

import json

import pytest

from specbench.data.records import read_questions
from specbench.errors import ConfigError


def file_of(tmp_path, *records):
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    return str(path)


def test_turns_and_messages_are_read(tmp_path):
    said = [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}, {"role": "assistant", "content": "x"},
            {"role": "user", "content": "b"}]  # fmt: skip
    path = file_of(tmp_path, {"question_id": "0f" * 16, "category": "rag", "turns": ["one", "two"]},
                   {"question_id": 2, "category": "qa", "messages": said})  # fmt: skip
    found = list(read_questions(path, None))
    assert [(p.id, p.turns, p.category) for p in found] == [("0f" * 16, ("one", "two"), "rag"), ("2", ("a", "b"), "qa")]


@pytest.mark.parametrize(("record", "expected"), [
    ({"turns": ["Full benchmark data should be fetched from the source"]}, "placeholder of SPEED-Bench"),
    ({"messages": [{"role": "system", "content": "s"}]}, "no list of turns"),
    ({"messages": ["a"]}, "no list of turns"),
    ({"messages": [{"role": "user", "content": 3}]}, "turn 1 is a number"),
])  # fmt: skip
def test_what_is_no_question_is_one_sentence(record, expected, tmp_path):
    with pytest.raises(ConfigError, match=expected):
        list(read_questions(file_of(tmp_path, record), None))
