"""A run that was killed or interrupted and continued gives what an unbroken one gives."""

import json

import pytest
from small_runs import call, fail_where, interrupt_the_second_group, run_main, small

from specbench.report import files
from specbench.report.files import read_run

OPTIONS = ("logger=none", "executor=eager", "data.limit=5", "hydra.run.dir=run")
# Of results.json, what does not follow from times.
FACTS = ("alpha", "alpha_counted", "alpha_on_target_text", "draft_acceptance_rate", "block_efficiency", "acceptance",
         "counts", "lossless", "operations_factor", "status")  # fmt: skip
CASES = {
    "sampled": ("temperature=1", "verdict_tokens=150"),
    "greedy": ("temperature=0",),
    "rows": ("batch_size=2", "data.limit=20", "max_new_tokens=6"),
    "beams": ("decoding=beam", "beams=2"),
}


def words_of(*overrides):
    given = {word.partition("=")[0] for word in overrides}
    return small(*(word for word in OPTIONS if word.partition("=")[0] not in given), *overrides)


def near(value):
    """Floats up to rounding: rows that decode together are read by other calls when some are known already."""
    if isinstance(value, dict):
        return {key: near(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [near(entry) for entry in value]
    return pytest.approx(value, rel=1e-5) if isinstance(value, float) else value


def facts(folder):
    """What must not depend on when the run was interrupted."""
    run = read_run(folder)
    found = {name: run.results[name] for name in FACTS}
    found["texts"] = [(record.id, record.group, record.speculative.ids, record.baseline.ids) for record in run.records]
    return found


def cut(folder, lines):
    """Leaves what a kill leaves: some whole lines, another one up to the middle of a character, and no results."""
    path = folder / "prompts.jsonl"
    kept = path.read_text().splitlines(keepends=True)
    path.write_bytes("".join(kept[:lines]).encode() + kept[lines][:200].encode() + "é".encode()[:1])
    for name in ("results.json", "rounds.parquet", "page.html"):
        (folder / name).unlink()
    return kept


@pytest.mark.parametrize("case", CASES)
def test_a_killed_run_continues(case, monkeypatch, tmp_path):
    words, folder = words_of(*CASES[case]), tmp_path / "run"
    assert call(words, monkeypatch, tmp_path) == 0
    unbroken = facts(folder)
    before = cut(folder, 2)
    assert call(words, monkeypatch, tmp_path) == 0
    assert facts(folder) == near(unbroken)
    assert (folder / "prompts.jsonl").read_text().splitlines(keepends=True)[:2] == before[:2]  # not decoded again
    assert any("by a process that was interrupted" in note for note in read_run(folder).results["notes"])


def test_after_ctrl_c_what_is_finished_is_measured_and_the_rest_continues(monkeypatch, capsys, tmp_path):
    words, folder = words_of(), tmp_path / "run"
    with monkeypatch.context() as patched:
        interrupt_the_second_group(patched)
        code, told = run_main(words, patched, capsys, tmp_path)
    assert code == 130 and "goes on from there" in told
    assert read_run(folder).results["status"] == "interrupted"
    assert read_run(folder).results["counts"]["prompts"] == 1
    assert call(words, monkeypatch, tmp_path) == 0
    continued = facts(folder)
    assert call(words_of("hydra.run.dir=other"), monkeypatch, tmp_path) == 0
    assert facts(tmp_path / "other") == near(continued)


def test_failed_prompts_are_decoded_again(monkeypatch, tmp_path):
    words, folder = words_of(), tmp_path / "run"
    calls = []
    with monkeypatch.context() as patched:
        fail_where(patched, lambda session, jobs: calls.append(1) or len(calls) == 2)
        assert call(words, patched, tmp_path) == 0
    assert read_run(folder).results["counts"]["failed"] == 1
    (folder / "results.json").unlink()
    assert call(words, monkeypatch, tmp_path) == 0
    assert read_run(folder).results["counts"]["failed"] == 0
    assert len({record.id for record in read_run(folder).records}) == len(read_run(folder).records) == 5


def test_other_settings_begin_anew(monkeypatch, tmp_path):
    folder = tmp_path / "run"
    assert call(words_of(), monkeypatch, tmp_path) == 0
    cut(folder, 2)
    assert call(words_of("gamma=2"), monkeypatch, tmp_path) == 0
    assert not any("interrupted" in note for note in read_run(folder).results["notes"])
    assert {max(record.speculative.rounds.gamma) for record in read_run(folder).records} == {2}


def test_other_prompts_begin_anew(monkeypatch, tmp_path):
    data, words = tmp_path / "own.jsonl", words_of("data=jsonl", "data.path=own.jsonl", "data.limit=4")
    for texts, known in (("abcd", False), ("abcd", True), ("abce", False)):
        data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
        assert call(words, monkeypatch, tmp_path) == 0
        run = read_run(tmp_path / "run")
        assert any("interrupted" in note for note in run.results["notes"]) == known
        assert [record.prompt for record in run.records] == [*texts]
        cut(tmp_path / "run", 2)


@pytest.mark.parametrize("damaged", ["gamma: [", "- 1", "\0"])
def test_a_damaged_configuration_is_as_other_settings(damaged, monkeypatch, tmp_path):
    assert call(words_of(), monkeypatch, tmp_path) == 0
    cut(tmp_path / "run", 2)
    (tmp_path / "run" / "config.yaml").write_text(damaged)
    assert call(words_of(), monkeypatch, tmp_path) == 0
    assert not any("interrupted" in note for note in read_run(tmp_path / "run").results["notes"])


@pytest.mark.parametrize("word", ["gamma=2", "force=true"])
def test_a_kill_while_a_run_begins_leaves_no_records_of_another(word, monkeypatch, tmp_path):
    folder, write, written = tmp_path / "run", files.write_text, []
    assert call(words_of(), monkeypatch, tmp_path) == 0
    if word == "gamma=2":
        cut(folder, 2)

    def killed(path, text):
        written.append(path)
        if len(written) == 2:  # of the records and the configuration one is new
            raise KeyboardInterrupt
        write(path, text)

    with monkeypatch.context() as patched:
        patched.setattr(files, "write_text", killed)
        assert call(words_of(word), patched, tmp_path) == 130
    assert call(words_of(word.replace("true", "false")), monkeypatch, tmp_path) == 0
    assert not any("interrupted" in note for note in read_run(folder).results["notes"])


def test_a_finished_run_is_done_again(monkeypatch, tmp_path):
    seconds = []
    for _ in range(2):
        assert call(words_of(), monkeypatch, tmp_path) == 0
        results = json.loads((tmp_path / "run" / "results.json").read_text())
        seconds.append(results["provenance"]["seconds"])
        assert results["counts"]["prompts"] == 5
    assert seconds[0] != seconds[1]
