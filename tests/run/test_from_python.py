"""`specbench.evaluate` beside the command line."""

import json
import logging
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hypothesis import given, settings
from hypothesis import strategies as st
from small_runs import call, small

import specbench
from specbench.config.compose import compose as compose_run
from specbench.config.compose import conf_dir
from specbench.errors import ConfigError
from specbench.run import evaluate as from_python
from specbench.run.evaluate import Evaluation, spelled, words_of

OPTIONS = small("temperature=0", "executor=eager", "drafter=random", "logger=none", "max_new_tokens=4")


def files(folder) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} - {".lock"}


def test_a_run_from_python_leaves_what_the_command_leaves(good, monkeypatch, tmp_path):
    words = [*OPTIONS, f"target.path={good}"]
    assert call([*words, "hydra.run.dir=typed"], monkeypatch, tmp_path) == 0
    before = logging.getLogger("specbench").handlers[:]
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):  # as a notebook may have it
        result = specbench.evaluate(*words[:-1], {"target": {"path": str(good)}}, "hydra.run.dir=called")
        assert GlobalHydra.instance().is_initialized() and compose("config").gamma == 3
    assert logging.getLogger("specbench").handlers == before
    assert result.folder == tmp_path / "called" and files(result.folder) == files(tmp_path / "typed")
    typed = json.loads((tmp_path / "typed" / "results.json").read_text())
    assert result.counts == typed["counts"] and f"target.path={good}" in result.details.overrides
    assert result.speedup.measured == result["speedup"]["measured"] and "peed" in repr(result)
    assert {"alpha", "folder"} <= set(dir(result)) and "alpha" in result
    with pytest.raises(AttributeError, match=r"'nothing' is not in results.json here: it has"):
        _ = result.nothing
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
    "b'x' is bytes and not a text": {"name": b"x"},
    "drafter=nothing is not a choice": {"drafter": "nothing"},
    "repeats=2 is not possible from Python": {"repeats": 2},
    "data.limit=0 is not allowed": {"data": {"limit": 0}},
}


def test_threads_compose_and_run_at_once(monkeypatch):
    """In one of them Hydra's own object is that of somebody else all the time; runs come one after the other."""
    under_way, most = [], []

    def run_one(words):
        under_way.append(1)
        most.append(len(under_way))
        seed = compose_run(words).seed
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
            words_of([{"seed": value}])


@pytest.mark.parametrize("sentence", MISTAKES)
def test_a_mistake_is_a_sentence(sentence, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(specbench.ConfigError, match=sentence):
        specbench.evaluate(**MISTAKES[sentence])
    with pytest.raises(specbench.ConfigError, match="7 is not an override"):
        specbench.evaluate(7)
    with pytest.raises(specbench.ConfigError, match="'-m' is not an override"):
        specbench.evaluate("-m", "gamma=1,2")
    with pytest.raises(specbench.ConfigError, match=r"hydra\.run\.dir='' is not allowed"):
        specbench.evaluate({"hydra.run.dir": ""})
    assert not [*tmp_path.iterdir()]


def test_settings_are_spelled_as_overrides():
    found = words_of(["gamma=2", {"data.limit": 3, "stop": ["a b"]}, {"drafter": "ngram", "data": {"count": 2}}])
    assert found == ["gamma=2", "data.limit=3", "stop=['a b']", "drafter=ngram", "data.count=2"]
    assert [spelled(value) for value in (None, True, 0, 1e-3, "a/b.txt")] == ["null", "true", "0", "0.001", "a/b.txt"]
    texts = ["1", "true", "null", "a'b\\"]  # like numbers, and stay texts
    assert compose_run(words_of([{"stop": texts}])).stop == texts


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
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
    assert yaml.safe_load((root / "CITATION.cff").read_text())["version"] == specbench.__version__
    with pytest.raises(AttributeError):
        _ = specbench.nothing


def test_an_evaluation_is_a_mapping(tmp_path):
    (tmp_path / "results.json").write_text(json.dumps({"a": {"b": [{"c": 1}]}, "keys": 2}))
    made = Evaluation(tmp_path)
    assert made.a.b[0].c == 1 and dict(made)["keys"] == 2 and len(made) == 2
