"""The shipped pairs beside the first one: they run from the drafter alone, on their own data."""

from pathlib import Path

import pytest
from choosing import slow_unless
from small_runs import composed, parts_of, run

from specbench.data.prompts import load
from specbench.data.text import UnconditionalData
from specbench.drafters.ngram_lm import training_tokens
from specbench.settings import place_of

DATA = {"ende": "ParallelData", "unconditional": "UnconditionalData"}
TASKS = {"ende": "ende", "bytes": "unconditional"}


def test_unconditional_prompts_differ_in_their_noise_alone():
    prompts = load(UnconditionalData(UnconditionalData.Settings(start=None, count=5, limit=3)))
    assert [prompt.id for prompt in prompts] == ["1", "2", "3"] and {prompt.turns for prompt in prompts} == {("",)}


SLOW = pytest.mark.slow
SHIPPED = [slow_unless(False, "ende", "ende"), slow_unless(False, "ende_small", "ende"), ("bytes", "unconditional")]


@pytest.mark.parametrize("drafter, data", SHIPPED)
def test_a_shipped_pair_runs_from_its_drafter_alone(drafter, data, tmp_path):
    """At temperature 0 the tokens are plain decoding's."""
    short = (f"data={data}", "temperature=0", "data.limit=1", "max_new_tokens=6", "executor=eager")
    parts = parts_of(f"drafter={drafter}", *short)
    target = drafter.split("_")[0]
    assert parts.target.name.endswith(f"{target}/target")
    assert composed(f"drafter={drafter}").data._target_.rpartition(".")[2] == DATA[data]
    result, _ = run(parts, tmp_path)
    assert result.lossless.passed and result.counts.tested > 0 and result.alpha.mean < 1


@pytest.mark.parametrize("pair", [pytest.param("ende", marks=SLOW), "bytes"])
def test_a_target_that_drafts_for_itself_is_always_accepted(pair, tmp_path):
    short = (f"data={TASKS[pair]}", "data.limit=1", "max_new_tokens=8", "executor=eager")
    own = parts_of(f"drafter={pair}", f"drafter.path=shipped:{pair}/target", *short)
    assert run(own, tmp_path)[0].alpha.mean == pytest.approx(1)


def test_drafters_of_counts_count_the_ends_of_a_translator_s_texts():
    """One end for each line of own.de, no unknown token for a line break; as one text it is the opposite."""
    lines = Path(place_of("shipped:ende/own.de")).read_text(encoding="utf-8").splitlines()
    parts = parts_of("drafter=ende_bigram", "data=ende", "data.limit=1", "max_new_tokens=2", "executor=eager")
    tokenizer = parts.target.tokenizer
    end, unknown = tokenizer.eos_token_id, tokenizer.unk_token_id
    counted = [int(parts.drafter.unigram[token]) - 1 for token in (end, unknown)]
    assert counted == [len(lines), 0] and len(lines) == 2000
    whole = training_tokens("shipped:ende/own.de", tokenizer).bincount(minlength=3)
    assert whole[end] == 0 and whole[unknown] == len(lines)
    texts = tokenizer.decode(training_tokens("shipped:ende/own.de", tokenizer, by_line=True)).split("</s>")
    assert [text.strip() for text in texts[:5]] == [line.strip() for line in lines[:5]]


def test_data_that_are_asked_for_win_over_the_drafter_s():
    assert composed("drafter=bytes", "data=stdlib").data._target_ == "specbench.data.stdlib.StdlibData"
