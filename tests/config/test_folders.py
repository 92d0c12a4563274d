"""Nothing that is finished is overwritten or lost, and what never began leaves nothing."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from small_runs import call

from specbench.config.paths import conf_dir
from specbench.data.prompts import load
from specbench.data.stdlib import StdlibData
from specbench.results import console as told
from specbench.results.completion import FILES, RESULTS, keep_other, keep_others, make_room
from specbench.results.console import Pace
from specbench.results.folder_lock import locked, remove_if_empty
from specbench.run.sweep import name_of_command
from specbench.settings import BaseSettings, describe


def files(folder):
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def filled(folder, text):
    for name in (*FILES, RESULTS, "report.html", "replay.json", "replay-1.json", "figures/a.svg"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"{text} {name}")
    return files(folder)


def test_an_earlier_run_is_kept_with_all_its_files(tmp_path):
    (tmp_path / "run.log").write_text("log")
    for number in (1, 2):
        before = {name: text for name, text in filled(tmp_path, f"run {number}").items()
                  if not name.startswith(("earlier", "run.log"))}  # fmt: skip
        assert make_room(tmp_path) == tmp_path / f"earlier-{number}"
        assert files(tmp_path / f"earlier-{number}") == before and len(before) == 10
    assert sorted(path.name for path in tmp_path.iterdir()) == ["earlier-1", "earlier-2", "run.log"]


@pytest.mark.parametrize("renamed", range(len(FILES) + 1))
def test_a_run_that_is_half_moved_aside_is_not_lost(renamed, monkeypatch, tmp_path):
    """The process ends after some of the renames; the next one finds every file of the run, in whichever folder."""
    before, rename, left = filled(tmp_path, "run"), Path.rename, iter(range(renamed))

    def ends(path, target):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Path, "rename", ends)
        make_room(tmp_path)
    make_room(tmp_path)
    assert sorted(files(tmp_path).values()) == sorted(before.values())


def test_files_of_a_run_that_has_no_results_are_no_run(tmp_path):
    (tmp_path / "config.yaml").write_text("left")
    assert make_room(tmp_path) is None and not [*tmp_path.iterdir()]


def test_files_that_belong_together_have_one_number(tmp_path):
    one, two, page, figures = (tmp_path / name for name in ("c.json", "c.csv", "report.html", "figures"))
    (tmp_path / "c-1.csv").write_text("in the way")
    kept = []
    for texts in (("a", "x"), ("a", "x"), ("b", "x"), ("b", "y")):
        kept.append([path.name for path in keep_others({one: texts[0], two: texts[1]}, [page, figures])])
        one.write_text(texts[0])
        two.write_text(texts[1])
        if texts[0] == "b":
            page.write_text("a page")  # made from these files: it gets their number
            figures.mkdir(exist_ok=True)
    assert kept == [[], [], ["c-2.json", "c-2.csv"], ["c-3.json", "c-3.csv", "report-3.html", "figures-3"]]
    assert files(tmp_path) == {"c.json": "b", "c.csv": "y", "c-1.csv": "in the way", "c-2.json": "a", "c-2.csv": "x",
                               "c-3.json": "b", "c-3.csv": "x", "report-3.html": "a page", "report.html": "a page",
                               }  # fmt: skip
    assert keep_other(one, "b") is None and keep_other(one, "z") == tmp_path / "c-1.json"


def hydras(folder):
    (folder / ".hydra").mkdir(parents=True)
    for name in (".hydra/config.yaml", "run.log", ".lock"):
        (folder / name).write_text("")
    return folder


def test_a_folder_of_a_run_that_never_began_goes(tmp_path):
    folder = hydras(tmp_path / "outputs" / "a" / "b" / "default")
    (tmp_path / "outputs" / "a" / "other").mkdir()
    remove_if_empty(folder)
    assert [path.name for path in (tmp_path / "outputs" / "a").iterdir()] == ["other"]
    remove_if_empty(hydras(tmp_path / "alone" / "outputs" / "run" / "default"))
    assert (tmp_path / "alone").is_dir() and not (tmp_path / "alone" / "outputs").exists()


@pytest.mark.parametrize("place", ["run/default", "outputs/run/default"])
def test_the_working_folder_stays(place, monkeypatch, tmp_path):
    """Also one that lies in a folder of the name outputs, and is empty."""
    work = tmp_path / "outputs" / "project"
    work.mkdir(parents=True)
    monkeypatch.chdir(work)
    remove_if_empty(hydras(work / place))
    assert work.is_dir() and not [*work.iterdir()]


def test_a_folder_that_is_used_stays(tmp_path):
    folder = hydras(tmp_path / "outputs" / "default")
    with locked(folder):
        remove_if_empty(folder)
    (folder / "prompts.jsonl.part").write_text("")
    remove_if_empty(folder)
    assert (folder / ".hydra" / "config.yaml").exists()


def test_a_configuration_that_is_not_possible_leaves_no_folder(monkeypatch, tmp_path, capsys):
    assert call(["drafter=model"], monkeypatch, tmp_path) == 2
    assert not [*tmp_path.iterdir()]
    assert call(["drafter=model", "hydra.run.dir=D"], monkeypatch, tmp_path) == 2
    assert call(["drafter=model", "++hydra.run.dir=E"], monkeypatch, tmp_path) == 2 and (tmp_path / "E").is_dir()
    sentence = capsys.readouterr().err.splitlines()[-1].removeprefix("specbench: ")
    assert sentence.startswith("drafter.path is not set") and sentence in (tmp_path / "D" / "run.log").read_text()


def test_sweeps_of_other_values_have_files_of_their_own():
    """However the values are given; what results do not depend on is no part of the name."""

    def named(*words):
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            loader = GlobalHydra.instance().config_loader()
            return name_of_command(loader.load_configuration("config", [*words], RunMode.MULTIRUN))

    of_file = "experiment=gamma"  # has hydra.sweeper.params
    names = [named(of_file), *(named(of_file, f"hydra.sweeper.params.gamma='{values}'") for values in ("1,2", "1,3"))]
    assert names[0] == of_file and len({*names}) == 3
    assert named("gamma=1,2", "force=true", "hydra.sweep.dir=d") == "gamma=1,2"


def test_a_line_for_each_job_and_the_time_left(monkeypatch, capsys):
    times = iter([100.0, 110.0, 110.0, 130.0])
    monkeypatch.setattr(told, "time", SimpleNamespace(monotonic=lambda: next(times)))
    pace = Pace(4)
    pace.end("gamma=1: 1.20x")
    pace.end("gamma=2: 1.30x", ran=False)
    pace.end("gamma=3: 1.40x")
    assert capsys.readouterr().out.splitlines() == [
        "1/4 gamma=1: 1.20x; 10 s; 30 s left",
        "2/4 gamma=2: 1.30x; 20 s left",
        "3/4 gamma=3: 1.40x; 20 s; 15 s left",
    ]


def test_a_run_in_short():
    result = {"speedup": {"measured": 1.364, "ci95": [1.3, 1.412]}, "alpha": {"mean": 0.617},
              "lossless": {"verdict": "passed"}, "machine": {"steady": True}}  # fmt: skip
    assert told.one_line(result) == "1.36x (1.30 to 1.41), alpha 0.62"
    result |= {"lossless": {"verdict": "failed"}, "machine": {"steady": False}, "alpha": {"mean": None}}
    assert told.one_line(result) == "1.36x (1.30 to 1.41), failed, not steady"


def test_data_smaller_than_the_limit_are_told(caplog):
    def count(limit):
        return len(load(StdlibData(limit=limit, count=3, kind="python")))

    assert count(40) == 3
    assert "data has 3 prompts, fewer than data.limit=40: all of them are used" in caplog.text
    caplog.clear()
    assert [count(limit) for limit in (2, 3, None)] == [2, 3, 3] and not caplog.text


def test_the_console_script_finds_modules_beside_the_user(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    assert call(["gama=3"], monkeypatch, tmp_path) == 2
    assert sys.path[-1] == str(tmp_path)


def schemas(base=BaseSettings):
    return {base, *(found for own in base.__subclasses__() for found in schemas(own))}


def test_what_a_key_accepts_is_said_in_words():
    """No word of Python's types reaches a sentence."""
    told = {
        describe(field.annotation, field.metadata) for schema in schemas() for field in schema.model_fields.values()
    }
    assert len(told) > 20 and any(words.endswith(" or null") for words in told)
    assert not [words for words in told if re.search(r"[|\[\]]|typing|None", words)]
