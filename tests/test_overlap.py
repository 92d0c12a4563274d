"""Words that prompts of a training share with public questions are found (experiments/smollm2/overlap.py)."""

import importlib.util
import json
import random
from pathlib import Path

import pytest

FILE = Path(__file__).parents[1] / "experiments" / "smollm2" / "overlap.py"


@pytest.fixture
def overlap():
    spec = importlib.util.spec_from_file_location("overlap", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_28_words_of_a_question_are_found_anywhere_in_a_prompt(overlap, tmp_path, monkeypatch):
    """Through the files, in other capitals and signs. Negative control: twelve words, which are too few."""
    monkeypatch.setattr(overlap, "HERE", tmp_path)
    rng = random.Random(0)
    for number in range(20):
        question, before, after = ([f"w{rng.randrange(1000)}" for _ in range(60)] for _ in range(3))
        begin = rng.randrange(32)
        for words, seen in ((28, True), (12, False)):
            shared = question[begin : begin + words]
            prompt = f"{' '.join(before)}: {', '.join(shared).upper()}? {' '.join(after[: rng.randrange(60)])}"
            for name, record in (("a", {"turns": ["other", " ".join(question)]}), ("b", {"prompt": prompt})):
                (tmp_path / f"{name}.jsonl").write_text(json.dumps(record) + "\n")
                overlap.write(name, [tmp_path / f"{name}.jsonl"])
            assert (overlap.common(overlap.read("a"), overlap.read("b")) > 0) == seen, number


def test_prompts_of_the_training_share_no_words_with_public_questions(overlap):
    """The prompts that drafter=smollm2_eagle3 was trained on, and Spec-Bench, MT-bench, GSM8K and HumanEval. Control:
    one of each is found in its own file, so the hashes are those of today's `sketch`."""
    prompts, questions = overlap.read("prompts"), overlap.read("questions")
    assert len(prompts) > 1000 and len(questions) > 10_000
    assert overlap.sketch("How does merlon work?") <= prompts
    assert overlap.sketch("Prove the Pythagorean theorem.") <= questions
    assert overlap.common(prompts, questions) == 0
