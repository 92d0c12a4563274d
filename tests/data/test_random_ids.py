"""Prompts of random tokens are told from text."""

import random

import pytest
from small_runs import short_prompts
from transformers import AutoTokenizer

from specbench.data.prompts import looks_random
from specbench.data.records import JsonlData, read_json_lines
from specbench.data.sources import place_of


@pytest.mark.parametrize("vocabulary", [4096, 50_000])
def test_random_ids_are_told_from_text(vocabulary):
    """Ids that are drawn evenly, and as frequent as words are; few of them say nothing."""
    generator = random.Random(0)
    even = [[generator.randrange(vocabulary) for _ in range(50)] for _ in range(100)]
    words = [[min(vocabulary - 1, int(generator.paretovariate(0.8))) for _ in range(50)] for _ in range(100)]
    assert looks_random(even, vocabulary) and not looks_random(words, vocabulary)
    assert not looks_random(even[:9], vocabulary) and looks_random(even[:12], vocabulary)


def test_the_included_prompts_are_text():
    tokenizer = AutoTokenizer.from_pretrained(place_of("shipped:target"))
    texts = [tokenizer(record["prompt"])["input_ids"] for _, record in read_json_lines(short_prompts())]
    assert not looks_random(texts, 4096)


def test_records_with_categories_are_taken_from_each(tmp_path):
    """The control: without the field the first ones are taken."""
    from specbench.data.prompts import load

    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"prompt": "p{n}", "kind": "{"ab"[n > 3]}"}}\n' for n in range(8)))
    for field, wanted in (("kind", ["a", "a", "b", "b"]), (None, [""] * 4)):
        settings = JsonlData.Settings(path=str(path), limit=4, field="prompt", template=None, category_field=field)
        assert [prompt.category for prompt in load(JsonlData(settings))] == wanted
