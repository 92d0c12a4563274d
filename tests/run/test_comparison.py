"""Methods that decode each prompt in turn, and finished runs that are compared afterwards."""

import json

import pytest
from choosing import slow_unless
from small_runs import interrupt_the_second_group, small

import specbench.models.load as loading
from specbench.report.files import read_run
from specbench.run.compare import advise, main
from specbench.run.session import Session

PAIR = ("drafter=random,ngram", "logger=none", "executor=eager", "data.limit=3", "target.path=shipped:drafter")


def compare(words, monkeypatch, capsys, folder, command=main):
    """The command in this process: exit code and all that it said."""
    monkeypatch.chdir(folder)
    code = 0
    try:
        command([*words])
    except SystemExit as stop:
        code = stop.code
    said = capsys.readouterr()
    return code, said.out + said.err


def comparison(folder):
    [path] = folder.rglob("comparison.json")
    return path.parent, json.loads(path.read_text())


def test_each_prompt_is_decoded_by_all_methods_and_plainly_once(monkeypatch, capsys, tmp_path):
    seen, plain = [], Session.decode

    def decode(self, jobs, speculative, *others, **options):
        seen.append((tuple(jobs[0].tokens), speculative))
        return plain(self, jobs, speculative, *others, **options)

    monkeypatch.setattr(Session, "decode", decode)
    monkeypatch.setattr("specbench.run.run.warm_up", lambda session, batch: None)
    loads, load = [], loading.load_module
    monkeypatch.setattr(loading, "load_module", lambda *given, **more: loads.append(1) or load(*given, **more))
    code, said = compare(small(*PAIR), monkeypatch, capsys, tmp_path)
    assert code == 0 and "of 2" in said and len(loads) == 1
    prompts = [prompt for prompt, _ in seen]
    assert len(seen) == 9 and prompts == sorted(prompts, key=prompts.index)  # a prompt ends before the next begins
    assert sum(not speculative for _, speculative in seen) == 3
    folder, found = comparison(tmp_path)
    assert found["kind"] == "comparison" and {row["method"] for row in found["rows"]} == {"random", "ngram"}
    assert (folder / "page.html").is_file() and found["rows"][0]["rank"] == 1
    runs = [read_run(folder / name) for name in ("random", "ngram")]
    assert [r.baseline.ids for r in runs[0].records] == [r.baseline.ids for r in runs[1].records]
    code, said = compare(small(*PAIR), monkeypatch, capsys, tmp_path)
    assert code == 0 and "finished before" in said and len(seen) == 9


def test_other_work_is_compared_apart(monkeypatch, capsys, tmp_path):
    code, said = compare(small(*PAIR, "temperature=0,1"), monkeypatch, capsys, tmp_path)
    assert code == 0 and "temperature=0" in said
    folders = sorted(path.parent.name for path in tmp_path.rglob("comparison.json"))
    assert folders == ["temperature=0", "temperature=1"]
    assert len([*tmp_path.rglob("page.html")]) == 4 + 2 + 1


def test_also_adds_methods_with_other_overrides(monkeypatch, capsys, tmp_path):
    words = [*small("drafter=random", *PAIR[1:]), "--also", "drafter=ngram gamma=2,3"]
    assert compare(words, monkeypatch, capsys, tmp_path)[0] == 0
    assert len(comparison(tmp_path)[1]["rows"]) == 3


def test_an_interrupted_comparison_goes_on(monkeypatch, capsys, tmp_path):
    with monkeypatch.context() as patched:
        interrupt_the_second_group(patched)
        code, said = compare(small(*PAIR), patched, capsys, tmp_path)
    assert code == 130 and "goes on from there" in said
    assert compare(small(*PAIR), monkeypatch, capsys, tmp_path)[0] == 0
    folder, _ = comparison(tmp_path)
    assert [read_run(folder / name).results["counts"]["prompts"] for name in ("random", "ngram")] == [3, 3]


@pytest.mark.parametrize(("words", "told"), [
    (["drafter=ngram"], "is one method"),
    (["drafter=ngram,random", "repeats=2"], "repeats is not possible"),
    (["drafter=ngram,randon"], "Did you mean drafter=random"),
    (["."], ". is not an override"),
])  # fmt: skip
def test_mistakes_are_one_sentence(words, told, monkeypatch, capsys, tmp_path):
    code, said = compare(words, monkeypatch, capsys, tmp_path)
    assert code == 2 and told in said and not [*tmp_path.iterdir()]


@pytest.mark.parametrize("size", ["1", slow_unless(False, "1,2")])
def test_advice_compares_drafters_and_gammas_at_each_batch_size(size, monkeypatch, capsys, tmp_path):
    few = ["drafter=ngram,suffix", "gamma=1", f"batch_size={size}", "data.limit=2", *PAIR[1:3], PAIR[-1]]
    code, said = compare(small(*few), monkeypatch, capsys, tmp_path, advise)
    assert code == 0 and "of 2" in said
    assert len([*tmp_path.rglob("comparison.json")]) == len(size.split(","))
