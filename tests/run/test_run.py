"""The whole command on little models: files, records, batches, failures, verdicts and exit codes."""

import json
from itertools import pairwise

import pandas as pd
import pytest
import yaml
from choosing import slow_unless
from small_runs import call, fail_where, finished, parts_of, run, run_main, small

from specbench.measure.schema import FIELDS
from specbench.report.files import read_run
from specbench.run.batching import groups_of
from specbench.run.jobs import locked

OPTIONS = ("logger=none", "executor=eager")
FILES = {"config.yaml", "prompts.jsonl", "results.json", "rounds.parquet", "page.html", "run.log"}


def texts(records):
    return [(record.id, record.speculative.ids, record.baseline.ids) for record in records]


def test_a_run_leaves_its_files_and_numbers(monkeypatch, tmp_path, capsys):
    assert call(small(*OPTIONS, "gamma=3", "data.limit=4"), monkeypatch, tmp_path) == 0
    [found] = (path.parent for path in tmp_path.rglob("results.json"))
    assert found.parent == tmp_path / "outputs" / "run" and {path.name for path in found.iterdir()} == FILES
    stored = read_run(found)
    assert set(stored.results) == set(FIELDS) and stored.results["status"] == "complete"
    assert stored.results["counts"]["prompts"] == len(stored.records) == 4
    assert stored.results["lossless"]["passed"] is not False
    assert yaml.safe_load((found / "config.yaml").read_text())["gamma"] == 3
    assert len(pd.read_parquet(found / "rounds.parquet")) >= stored.results["counts"]["rounds"]
    shown = capsys.readouterr().out
    assert "Theorem 3.8" in shown and found.name in shown.replace("\n", "")


def test_every_prompt_is_decoded_both_ways_with_all_of_its_rounds():
    result, records, _ = finished("gamma=3", "temperature=1", *OPTIONS)
    for record in records:
        for text in (record.speculative, record.baseline):
            rounds = text.rounds
            assert sum(rounds.tokens) == len(text.ids) <= record.limit
            phases = (rounds.draft, rounds.verify, rounds.accept, rounds.host)
            assert text.seconds == pytest.approx(sum(map(sum, phases)))
        assert set(record.baseline.rounds.gamma) == {0} and max(record.speculative.rounds.gamma) == 3
    assert result.counts.tokens == sum(len(record.speculative.ids) for record in records)
    assert result.alpha.n == result.counts.tested == sum(sum(r.speculative.rounds.tested) for r in records)


def test_temperature_0_gives_plain_decoding_s_text():
    result, records, _ = finished("temperature=0", *OPTIONS)
    assert all(ours == plain for _, ours, plain in texts(records)) and result.lossless.passed


def test_batches_change_no_token():
    _, alone, _ = finished("temperature=1", *OPTIONS)
    _, together, _ = finished("temperature=1", "batch_size=3", "cache=paged", *OPTIONS)
    assert texts(alone) == texts(together)
    assert max(max(record.speculative.rounds.rows) for record in together) == 3


def test_turns_see_plain_decoding_s_answers(tmp_path):
    path = tmp_path / "questions.jsonl"
    lines = [{"question_id": n, "category": "ab"[n], "turns": ["def f(x):", "    y ="][: n + 1]} for n in (0, 1)]
    path.write_text("\n".join(map(json.dumps, lines)))
    result, records = run(parts_of("data=questions", f"data.path={path}", "data.limit=null", *OPTIONS), tmp_path / "a")
    assert [(record.prompt_id, record.turn) for record in records] == [("0", 0), ("1", 0), ("1", 1)]
    assert records[1].baseline.text.strip() in records[2].prompt
    assert [category.category for category in result.by_category] == ["a", "b"]


@pytest.mark.parametrize("drafter", ["ngram", slow_unless(False, "suffix")])
def test_lossy_by_choice_is_said(drafter, tmp_path):
    result, _ = run(parts_of(f"drafter={drafter}", "verifier=typical", *OPTIONS), tmp_path)
    assert not result.lossless.expected and result.lossless.reason


def test_a_failed_prompt_is_recorded_as_failed(monkeypatch, tmp_path):
    calls = []
    fail_where(monkeypatch, lambda session, jobs: calls.append(1) or len(calls) == 2)
    result, records = run(parts_of("data.limit=3", *OPTIONS), tmp_path)
    failed = [record for record in records if record.failed]
    assert len(records) == 3 and len(failed) == result.counts.failed == 1
    assert "out of memory" in failed[0].failed and failed[0].speculative is None


def test_a_run_whose_every_prompt_failed_has_exit_code_1(monkeypatch, capsys, tmp_path):
    fail_where(monkeypatch, lambda session, jobs: True)
    code, told = run_main(small(*OPTIONS), monkeypatch, capsys, tmp_path)
    assert code == 1 and "every prompt failed" in told.splitlines()[-1]
    assert not [*tmp_path.rglob("results.json")]


@pytest.mark.parametrize(("options", "code"), [((), 0), (("lenience=0.5",), 0), (("verdict_tokens=0",), 3)])
def test_strict_refuses_what_is_not_shown_to_be_lossless(options, code, monkeypatch, capsys, tmp_path):
    words = small(*OPTIONS, "strict=true", "data.limit=8", "max_new_tokens=32", *options)
    found, told = run_main(words, monkeypatch, capsys, tmp_path)
    assert found == code and ("lossless is unknown" in told) == (code == 3)


def test_a_folder_in_use_is_refused(monkeypatch, capsys, tmp_path):
    with locked(tmp_path / "run"):
        code, told = run_main(small(*OPTIONS, "hydra.run.dir=run"), monkeypatch, capsys, tmp_path)
    assert code == 2 and "is in use by another process" in told


def test_a_refused_run_leaves_no_folder(monkeypatch, tmp_path):
    assert call(["drafter=model"], monkeypatch, tmp_path) == 2 and not [*tmp_path.iterdir()]
    assert call(["drafter=model", "hydra.run.dir=D"], monkeypatch, tmp_path) == 2
    assert "drafter.path is not set" in (tmp_path / "D" / "run.log").read_text()


def test_a_run_beside_peers(tmp_path):
    result, records = run(parts_of("peers=transformers", "data.limit=3", "temperature=0", *OPTIONS), tmp_path)
    assert result.speedup_over and all(each.measured > 0 for each in result.speedup_over.values())
    for name in records[0].peers:
        assert name in result.speedup_over and f"{name}_tokens_per_second" in result.throughput


def test_groups_are_as_equal_as_can_be():
    assert groups_of(40, 1, False) == [*range(41)] and groups_of(0, 8, False) == groups_of(0, 1, True) == []
    for requests, largest in ((1, 1), (7, 7), (40, 40), (64, 22), (90, 30), (600, 75), (1025, 114)):
        cuts = groups_of(requests, 8, False)
        sizes = [end - begin for begin, end in pairwise(cuts)]
        assert cuts[0] == 0 and cuts[-1] == requests and max(sizes) == largest <= min(sizes) + 1
    assert groups_of(40, 1, True) == [*range(0, 41, 5)] and groups_of(3, 1, True) == [0, 3]


def test_a_target_whose_logits_are_not_finite_is_not_lossless(monkeypatch, tmp_path):
    parts = parts_of("temperature=1", *OPTIONS)
    forward = parts.target.forward

    def broken(*given, **more):
        logits = forward(*given, **more).clone()
        logits[..., ::9] = float("nan")
        return logits

    monkeypatch.setattr(parts.target, "forward", broken)
    result, _ = run(parts, tmp_path)
    assert result.lossless.passed is False and result.lossless.reason
    assert read_run(tmp_path).results["alpha"]["mean"] is None
