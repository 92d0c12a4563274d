"""What a run leaves in its folder, and what is read of folders that a kill, or another version, has left."""

import json

import pytest
from records import facts, records
from stored import put, stored

from specbench.errors import ConfigError
from specbench.measure.results import results
from specbench.report import files, page


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return stored(tmp_path_factory.mktemp("one") / "run", overrides=["gamma=4"])


def test_what_is_written_is_read_again(run):
    again = files.read_run(run.folder)
    assert again.results == json.loads(json.dumps(run.results)) and again.label == "run"
    assert [record.line() for record in again.records] == [record.line() for record in records()]


def test_results_follow_from_the_records_that_are_stored(run):
    """prompts.jsonl is the record: the same numbers come out of it again."""
    again = results(files.read_run(run.folder).records, facts(overrides=["gamma=4"]))
    assert json.loads(json.dumps(again)) == files.read_run(run.folder).results


def test_a_number_that_json_lacks_is_refused_and_the_old_file_stays(run, tmp_path):
    folder = stored(tmp_path / "run").folder
    before = (folder / files.RESULTS).read_bytes()
    with pytest.raises(ValueError, match="JSON"):
        page.write_run(folder, run.results | {"operations_factor": float("nan")}, records())
    assert (folder / files.RESULTS).read_bytes() == before


def test_a_kill_while_writing_leaves_the_file_that_was_there(run, tmp_path, monkeypatch):
    path = tmp_path / files.RESULTS
    files.write_text(path, "old")

    def killed(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(files.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        files.write_text(path, "new")
    assert path.read_text() == "old"
    monkeypatch.undo()
    files.write_text(path, "new")
    assert path.read_text() == "new" and [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (None, "is not there"),
        (b"", "cannot be read"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b'{"schema_version": 3, "na', "cannot be read"),
        (b"[1]", "not written by this version"),
        (b"3", "not written by this version"),
        (b'{"schema_version": 1}', "schema_version is 1"),
        (b'{"kind": "comparison"}', "schema_version is null"),
    ],
)
def test_results_that_are_none_are_refused_in_a_sentence(content, match, tmp_path):
    if content is not None:
        (tmp_path / files.RESULTS).write_bytes(content)
    with pytest.raises(ConfigError, match=match):
        files.read_run(tmp_path)


def test_a_run_that_was_killed_before_its_results_is_no_finished_run(run, tmp_path):
    put(tmp_path / "killed", records())
    (tmp_path / "killed" / f"{files.RESULTS}.part").write_text("{")
    with pytest.raises(ConfigError, match="no finished run"):
        files.read_all(tmp_path)
    done = stored(tmp_path / "done")
    assert [found.folder for found in files.read_all(tmp_path)] == [done.folder]


def test_processes_inside_a_run_are_no_runs_of_their_own(tmp_path):
    whole = stored(tmp_path / "whole")
    stored(tmp_path / "whole" / "process=0")
    other = stored(tmp_path / "other", overrides=["gamma=2"])
    assert {found.folder for found in files.read_all(tmp_path)} == {whole.folder, other.folder}


def test_runs_are_named_by_what_differs():
    assert files.labels_of([["a=1", "drafter=x"], ["a=1", "drafter=y"]]) == ["x", "y"]
    assert files.labels_of([["gamma=1", "t=0"], ["gamma=2", "t=0"]]) == ["gamma=1", "gamma=2"]
    assert files.labels_of([["gamma=1"], []]) == ["gamma=1", "default"]
    assert files.labels_of([["a=1", "b=x"], ["a=1", "b=y", "c=3"]]) == ["b=x", "b=y, c=3"]
    assert len(files.labels_of([["gamma=1"]])) == 1 and files.labels_of([]) == []
