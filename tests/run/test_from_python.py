"""`specbench.evaluate` beside the command line."""

import json
import logging
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.text import Text
from small_runs import call, small

import specbench
from specbench.config.compose import compose as compose_run
from specbench.config.paths import conf_dir
from specbench.errors import ConfigError
from specbench.results.console import decoding_progress
from specbench.results.reader import StoredRun
from specbench.results.recommendation import verdict_sentence
from specbench.results.report.run_description import commands
from specbench.run import api as from_python
from specbench.run.api import Evaluation, spelled, words_of

OPTIONS = small("temperature=0", "executor=eager", "drafter=random", "logger=none", "max_new_tokens=4")


def files(folder) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} - {".lock"}


def test_a_run_from_python_leaves_what_the_command_leaves(good, monkeypatch, tmp_path):
    words = [*OPTIONS, f"target.path={good}"]
    assert call([*words, "hydra.run.dir=typed"], monkeypatch, tmp_path) == 0
    before = logging.getLogger("specbench").handlers[:]
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):  # as a notebook may have it
        result = specbench.evaluate(*words[:-1], {"target": {"path": str(good)}}, "hydra.run.dir=called")
        assert GlobalHydra.instance().is_initialized() and compose("config").gamma == 4
    assert logging.getLogger("specbench").handlers == before
    assert result.folder == tmp_path / "called" and files(result.folder) == files(tmp_path / "typed")
    written = json.loads((result.folder / "results.json").read_text())
    typed = json.loads((tmp_path / "typed" / "results.json").read_text())
    assert written["provenance"]["call"].startswith("specbench.evaluate('") and "call" not in typed["provenance"]
    told = SimpleNamespace(evaluate=lambda *overrides: words_of(overrides, {}))
    assert eval(written["provenance"]["call"], {"specbench": told})[:-1] == words  # Python that makes the call again
    assert commands([StoredRun(result.folder, written)], together=False)[0].endswith(written["provenance"]["call"])
    assert written["config_digest"] == typed["config_digest"] and written["counts"] == typed["counts"]
    for name in ("config.yaml", ".hydra/config.yaml", "rounds.parquet"):
        assert (result.folder / name).exists()
    assert (result.folder / ".hydra/config.yaml").read_text() == (tmp_path / "typed/.hydra/config.yaml").read_text()
    assert len(yaml.safe_load((result.folder / ".hydra/overrides.yaml").read_text())) == len(words)
    assert verdict_sentence(written) in (result.folder / "run.log").read_text()

    assert result.speedup.measured == written["speedup"]["measured"] == result["speedup"]["measured"]
    assert result.cost.by_gamma[0].rounds == written["cost"]["by_gamma"][0]["rounds"]
    assert {"alpha", "folder"} <= set(dir(result)) and "alpha" in result
    for name, meant in {"tau": "block_efficiency.mean", "MAT": "block_efficiency.mean", "speed": "speedup"}.items():
        with pytest.raises(AttributeError, match=f"here, did you mean {meant}[?]: it has"):
            getattr(result, name)
    with pytest.raises(AttributeError, match=r"'nothing' is not in results.json here: it has"):
        _ = result.nothing
    wrapped = [line for line in repr(result).splitlines() if "python -m specbench" not in line]  # that is to be copied
    assert "block efficiency" in repr(result) and max(map(len, wrapped)) <= 100
    assert result._repr_html_().startswith("<pre") and "block efficiency" in result._repr_html_()

    again = specbench.evaluate(*words, seed=1)  # a second one in this process, in the folder of its own name
    assert again.config.seed == 1 and again.folder.is_relative_to(tmp_path / "outputs" / "run")


def test_a_run_that_never_begins_leaves_no_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "f.jsonl").write_text('{"prompt": "x"}\n')
    with pytest.raises(specbench.ConfigError, match="nope"):
        specbench.evaluate("data=jsonl", "data.field=nope", "logger=none", data={"path": str(tmp_path / "f.jsonl")})
    assert not (tmp_path / "outputs").exists()


MISTAKES = {
    "gama is not a setting": {"gama": 3},
    "gamma=-1 is not allowed": {"gamma": -1},
    "b'x' is not possible: a text is needed and not bytes": {"name": b"x"},
    "drafter=nothing is not a choice": {"drafter": "nothing"},
    "repeats=2 is not possible from Python": {"repeats": 2},
    "data.limit=0 is not allowed": {"data": {"limit": 0}},
}


def test_threads_compose_and_run_at_once(monkeypatch):
    """In one of them Hydra's own object is that of somebody else all the time; runs come one after the other."""
    under_way, most = [], []

    def run_one(overrides, settings):
        under_way.append(1)
        most.append(len(under_way))
        seed = compose_run(words_of(overrides, settings)).seed
        under_way.pop()
        return seed

    monkeypatch.setattr(from_python, "_evaluate", run_one)
    with initialize_config_dir(str(conf_dir()), version_base="1.3"), ThreadPoolExecutor(4) as pool:
        theirs = GlobalHydra.instance().hydra
        composed = [pool.submit(compose_run, [f"gamma={gamma}"]) for gamma in range(1, 9)]
        assert [*pool.map(lambda seed: specbench.evaluate(seed=seed), range(8))] == [*range(8)]
        assert [found.result().gamma for found in composed] == [*range(1, 9)] and max(most) == 1
        assert GlobalHydra.instance().hydra is theirs


def test_values_that_cannot_be_spelled_are_a_sentence():
    within: dict = {}
    within["a"] = within
    for value in (10**5000, within):
        with pytest.raises(ConfigError, match="a value is not possible"):
            words_of([], {"seed": value})


@pytest.mark.parametrize("sentence", MISTAKES)
def test_a_mistake_is_a_sentence(sentence, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(specbench.ConfigError, match=sentence):
        specbench.evaluate(**MISTAKES[sentence])
    with pytest.raises(specbench.ConfigError, match="7 is not an override"):
        specbench.evaluate(7)
    for word in ("-m", "--multirun"):
        with pytest.raises(specbench.ConfigError, match=rf"'{word}' is an option .* use python -m specbench.compare"):
            specbench.evaluate(word, "gamma=1,2")
    with pytest.raises(specbench.ConfigError, match=r"hydra\.run\.dir='' is not allowed"):
        specbench.evaluate({"hydra.run.dir": ""})
    assert not [*tmp_path.iterdir()]


def test_settings_are_spelled_as_overrides():
    found = words_of(["gamma=2", {"data.limit": 3, "stop": ["a b"]}], {"drafter": "ngram", "data": {"count": 2}})
    assert found == ["gamma=2", "data.limit=3", "stop=['a b']", "drafter=ngram", "data.count=2"]
    assert [spelled(value) for value in (None, True, 0, 1e-3, "a/b.txt")] == ["null", "true", "0", "0.001", "a/b.txt"]
    texts = ["1", "true", "null", "a'b\\"]  # like numbers, and stay texts
    assert compose_run(words_of([], {"stop": texts})).stop == texts


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(codec="utf-8", exclude_categories=["C"]), min_size=1, max_size=12))
def test_any_text_arrives_as_it_is(text):
    """Through Hydra's own parser, which is what reads it."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    [override] = OverridesParser.create().parse_overrides([f"stop={spelled(text)}"])
    value = override.value()
    assert isinstance(value, str) and value == text


@pytest.mark.parametrize("module", ["specbench", "specbench.settings"])  # the second one is the negative control
def test_importing_the_package_loads_nothing(module):
    heavy = ("torch", "transformers", "hydra", "omegaconf", "numpy", "rich", "wandb")
    code = f"import sys, {module}; specbench.__version__; print([m for m in sys.modules if m in {heavy}])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip() == "[]") == (module == "specbench"), done.stderr


def test_the_version_is_one_everywhere(monkeypatch, tmp_path, capsys):
    assert call(["--version"], monkeypatch, tmp_path) == 0
    assert capsys.readouterr().out == f"specbench {specbench.__version__}\n"
    root = conf_dir().parent
    assert f"## {specbench.__version__}" in (root / "CHANGELOG.md").read_text()
    assert yaml.safe_load((root / "CITATION.cff").read_text())["version"] == specbench.__version__
    with pytest.raises(AttributeError):
        _ = specbench.nothing


def test_an_evaluation_is_a_mapping(tmp_path):
    made = Evaluation({"a": {"b": [{"c": 1}]}, "keys": 2}, tmp_path)
    assert made.a.b[0].c == 1 and dict(made)["keys"] == 2 and len(made) == 2


def test_a_table_is_as_wide_as_what_shows_it(monkeypatch, tmp_path):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert from_python._width() == from_python.WIDTH  # neither a terminal nor a notebook
    monkeypatch.setenv("COLUMNS", "63")
    assert from_python._width() == 63


def test_a_notebook_shows_one_line_of_progress_and_the_table_once(monkeypatch):
    lines = []
    shown = SimpleNamespace(update=lambda line, raw: lines.append(line["text/plain"]))

    def display(line, raw, display_id=None, **more):
        lines.append(line["text/plain"])
        return shown

    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    with decoding_progress() as progress:
        progress(0, 4, "warm-up")
        progress(1, 4, "decoding")
    assert lines[0] == "loading" and lines[1].startswith("warm-up: 0 of 4 requests, 0 s")
    assert lines[2].startswith("decoding: 1 of 4 requests, 0 s, about 0 s left") and lines[3:] == [""]
    lines.clear()
    monkeypatch.setattr("specbench.results.run_table.run_table", lambda result, folder: Text("the table"))
    assert repr(Evaluation({}, Path("x"))) == "the table\n" and not lines  # Rich would show it by itself
