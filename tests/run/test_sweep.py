"""Sweeps, repeats and runs that are joined: what is finished is skipped, and records are pooled."""

import csv
import json

import pytest
from small_runs import call, fail_where, run_main, small

from specbench.report.files import read_all, read_run
from specbench.run import collect

OPTIONS = ("logger=none", "executor=eager")


def started(folder):
    return {path: json.loads(path.read_text())["provenance"]["started"] for path in folder.rglob("results.json")}


def test_a_sweep_has_a_table_and_skips_what_is_finished(monkeypatch, capsys, tmp_path):
    words = ["-m", *small(*OPTIONS, "gamma=1,2")]
    assert call(words, monkeypatch, tmp_path) == 0
    assert "2 runs" in capsys.readouterr().out
    folder, before = tmp_path / "outputs" / "run", started(tmp_path)
    with (folder / "summary.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["run"] for row in rows] == ["gamma=1", "gamma=2"]
    assert all(float(row["speedup/measured"]) > 0 for row in rows)
    assert (folder / "page.html").is_file() and len(read_all(folder)) == 2
    assert call(["-m", *small(*OPTIONS, "gamma=1,2,3")], monkeypatch, tmp_path) == 0
    assert capsys.readouterr().out.count("finished before, skipped") == 2
    assert {path: when for path, when in started(tmp_path).items() if path in before} == before
    assert call([*words, "force=true"], monkeypatch, tmp_path) == 0
    assert "finished before" not in capsys.readouterr().out
    with (folder / "summary.csv").open() as file:  # of all sweeps of this name
        assert [row["gamma"] for row in csv.DictReader(file)] == ["1", "2", "3"]


def test_a_job_whose_prompts_have_changed_is_done_again(monkeypatch, capsys, tmp_path):
    words = ["-m", *small(*OPTIONS, "gamma=1", "data=jsonl", "data.path=own.jsonl")]
    for text, skipped in (("def f", 0), ("def f", 1), ("import", 0)):
        (tmp_path / "own.jsonl").write_text(json.dumps({"prompt": text}))
        assert call(words, monkeypatch, tmp_path) == 0
        assert capsys.readouterr().out.count("finished before") == skipped


def test_a_job_that_fails_leaves_the_others(monkeypatch, capsys, tmp_path):
    fail_where(monkeypatch, lambda session, jobs: session.parts.policy.largest == 2)
    code, told = run_main(["-m", *small(*OPTIONS, "gamma=1,2,3")], monkeypatch, capsys, tmp_path)
    assert code == 1 and "1 of 3 jobs have no results" in told and len(started(tmp_path)) == 2


def test_all_jobs_are_checked_before_the_first_one_starts(monkeypatch, capsys, tmp_path):
    code, told = run_main(["-m", *small(*OPTIONS, "gamma=1,-2")], monkeypatch, capsys, tmp_path)
    assert code == 2 and "gamma=-2 is not allowed" in told and not started(tmp_path)


def test_strict_sweeps_have_exit_code_3(monkeypatch, capsys, tmp_path):
    words = ["-m", *small(*OPTIONS, "gamma=1,2", "strict=true", "verdict_tokens=0")]
    code, told = run_main(words, monkeypatch, capsys, tmp_path)
    assert code == 3 and "2 of 2 jobs are not shown to be lossless" in told and len(started(tmp_path)) == 2


@pytest.mark.slow
def test_hydra_s_launchers_run_jobs_elsewhere(monkeypatch, capsys, tmp_path):
    words = ["-m", *small(*OPTIONS, "gamma=1,2", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2")]
    assert call(words, monkeypatch, tmp_path) == 0 and "2 runs" in capsys.readouterr().out


def test_repeats_pool_the_records_of_fresh_processes(monkeypatch, tmp_path):
    words = small(*OPTIONS, "repeats=2", "hydra.run.dir=run")
    assert call(words, monkeypatch, tmp_path) == 0
    pooled, parts = read_run(tmp_path / "run"), [read_run(tmp_path / "run" / f"process={n}") for n in range(2)]
    assert [record.process for record in pooled.records] == [0, 0, 1, 1]
    for name in ("tokens", "rounds", "tested", "accepted"):
        assert pooled.results["counts"][name] == sum(part.results["counts"][name] for part in parts)
    assert pooled.results["details"]["processes"] == 2
    assert parts[0].results["provenance"]["started"] != parts[1].results["provenance"]["started"]
    assert [run.folder for run in read_all(tmp_path)] == [tmp_path / "run"]  # the processes are part of it
    before = started(tmp_path / "run" / "process=0")
    (tmp_path / "run" / "process=1" / "results.json").unlink()
    assert call(words, monkeypatch, tmp_path) == 0
    assert started(tmp_path / "run" / "process=0") == before


def test_parts_of_one_data_set_are_joined(monkeypatch, capsys, tmp_path):
    shared = small(*OPTIONS, "data.limit=4")
    for part, words in {"whole": (), "one": ("take=2",), "two": ("skip=2",), "other": ("gamma=2",)}.items():
        assert call([*shared, *words, f"hydra.run.dir={part}"], monkeypatch, tmp_path) == 0
    collect.main(["one", "two", "--into", "joined"])
    joined, whole = read_run(tmp_path / "joined"), read_run(tmp_path / "whole")
    assert joined.results["counts"] == whole.results["counts"]
    assert joined.results["alpha"] == pytest.approx(whole.results["alpha"])
    assert [record.id for record in joined.records] == [record.id for record in whole.records]
    for other, said in (("other", "gamma=2"), ("one", "give each part once")):
        with pytest.raises(SystemExit):
            collect.main(["one", other, "--into", "wrong"])
        assert said in capsys.readouterr().err and not (tmp_path / "wrong").exists()
