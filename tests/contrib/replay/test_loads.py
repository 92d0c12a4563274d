"""Replay of gamma policies on batches, and traces of other engines."""

import json
from dataclasses import replace

import numpy as np
import pytest

import specbench.contrib.replay.command as command
from specbench.contrib.replay import loads
from specbench.contrib.replay.batched import BatchLoad, RoundSeconds, Traced, foreseen, runs_of, simulate
from specbench.contrib.replay.trace_file import load_file
from specbench.errors import ConfigError
from specbench.policies.gamma.fixed import FixedGamma
from specbench.policies.gamma.goodput import GoodputGamma
from specbench.theory import walltime_improvement


def texts_of(alpha, texts=8, length=400, seed=0):
    generator = np.random.default_rng(seed)
    outcomes = generator.random((texts, length)) < alpha
    return [Traced(runs_of(own), np.full(length, np.nan), np.full(length, alpha)) for own in outcomes]


def test_a_load_of_one_row_is_theorem_3_8_and_the_oracles_are_in_order():
    load = BatchLoad(texts_of(0.8), RoundSeconds(1.0, 0.1, 0.0, 0.0), 1, 0)
    plain, drafted = (simulate(load, FixedGamma(gamma), 2000) for gamma in (0, 4))
    assert plain.per_second == 1 and plain.rounds == 2000
    expected = walltime_improvement(0.8, 4, 0.1)
    assert drafted.per_second == pytest.approx(expected, rel=0.04)
    betas, outcomes = (foreseen(load, 10, 2000, betas=betas).per_second for betas in (True, False))
    assert expected < betas * 1.05 < outcomes


@pytest.mark.parametrize("by_row", [False, True])
def test_tokens_are_of_columns_or_of_rows(by_row):
    load = BatchLoad(texts_of(0.5), RoundSeconds(1.0, 0.0, 1.0, 0.5), 3, 10, by_row)
    assert load.seconds(4, [4, 0, 1], 30) == 1 + (8 if by_row else 15) + 15


def test_goodput_follows_batch_and_context_where_a_constant_gamma_cannot():
    cost, tokens = RoundSeconds(5e-3, 1e-4, 1e-4, 4e-8), 400
    for rows, context in ((1, 0), (64, 0), (64, 8000)):
        load = BatchLoad(texts_of(0.6, 16), cost, rows, context)
        best = max(simulate(load, FixedGamma(gamma), tokens).per_second for gamma in (0, 1, 2, 3, 4, 6))
        made = GoodputGamma(largest=6, signal="none", by_row=False, forget=0.02, probe=64)
        assert simulate(load, made, tokens).per_second > 0.95 * best
    assert simulate(load, FixedGamma(0), tokens).per_second < 0.9 * best  # so the choice matters


def test_a_file_of_another_engine_is_read(tmp_path, capsys, monkeypatch):
    lines = [{"accepted": [2, 1, 0, 5, 0, 3]}, {"per_step_accepted": [2, 0], "per_step_drafted": [3, 3]}]
    path = tmp_path / "traces.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    assert [text.lengths.tolist() for text in load_file(path)] == [[2, 1, 0, 2, 0, 0], [2, 1, 0, 0]]
    monkeypatch.setenv("COLUMNS", "200")
    command.main([str(path), "cost=1,.1,.01,0", "batch_size=2", "tokens=20", "gamma_policy=goodput,adaptive"])
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("best gamma", "goodput", "adaptive", "oracle", "simulated"))


def test_texts_of_one_token_and_none_accepted_are_replayed():
    for lengths in ([0], [0, 0, 0]):
        texts = [Traced(np.array(lengths), np.full(len(lengths), 0.5))]
        load = BatchLoad(texts, RoundSeconds(1.0, 0.1, 0.0, 0.0), 2, 0)
        for signal in ("none", "confidence"):
            made = GoodputGamma(largest=4, signal=signal, by_row=False, forget=0.02, probe=64)
            assert simulate(load, made, 50).per_second > 1.9
    load.texts = [replace(text, greedy=True) for text in texts]  # above temperature 0 it is refused
    assert [name for name, _ in loads.built(load, ["confidence"], [])] == ["confidence"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ({}, "it must have accepted, or per_step_accepted and per_step_drafted"),
        ({"accepted": [1, -1]}, "whole numbers"),
        ({"accepted": [True]}, "whole numbers"),
        ({"per_step_accepted": [3], "per_step_drafted": [2]}, "no larger"),
        ({"accepted": [0, 0], "confidence": [0.5]}, "confidence"),
    ],
)
def test_a_bad_file_is_one_sentence(line, expected, tmp_path):
    (tmp_path / "t.jsonl").write_text(json.dumps(line))
    with pytest.raises(ConfigError, match=expected) as error:
        load_file(tmp_path / "t.jsonl")
    assert "line 1" in str(error.value)


@pytest.mark.parametrize("words", [["cost=1,2"], ["cost=0,0,0,0"], ["cost=a,1,1,1"], [], ["cost=1,0,0,0", "by_row=1"],
                                   ["cost=1,0,0,0", "batch_size=0"], ["cost=1,0,0,0", "tokens=x"],
                                   ["cost=1,0,0,0", "tokens=5,6"], ["cost=1,0,0,0", "batch_size=1.5"]])  # fmt: skip
def test_loads_that_cannot_be_are_refused(words):
    with pytest.raises(ConfigError, match=f"{(words or ['cost'])[-1].partition('=')[0]}="):
        loads.asked_loads(words)
