"""What a command loads before it answers, and that what it says is what the schema has."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from choosing import only
from omegaconf import OmegaConf

from specbench.config.check import base_of
from specbench.config.compose import GROUPS, RunConfig, conf_dir, known_keys

HEAVY = ("torch", "transformers", "wandb", "pyarrow", "matplotlib", "pandas")
SAY = """import atexit, runpy, sys
atexit.register(lambda: print("loaded:", [name for name in %r if name in sys.modules]))
sys.argv = ["specbench", *%r]
runpy.run_module(%r, run_name="__main__", alter_sys=True)
"""


def loaded(folder: Path, *arguments: str, module: str = "specbench", code: int = 2) -> tuple[str, str]:
    """Which of HEAVY a command has loaded when it ends with an exit code, and what it says: a mistake, or an answer."""
    say = SAY % (HEAVY, arguments, module)
    done = subprocess.run([sys.executable, "-c", say], capture_output=True, text=True, cwd=folder, timeout=120)
    told, _, found = done.stdout.rpartition("loaded: ")
    assert done.returncode == code and len(done.stderr.strip().splitlines()) == bool(code), done.stderr
    return found.strip(), done.stderr.strip() if code else told


MISTAKES = {
    "gama=3": "gama is not a setting. Did you mean gamma?",
    "gamma=-1": "gamma=-1 is not allowed",
    "drafter=nothing": "drafter=nothing is not a choice",
    "data=jsonl data.path=none.jsonl": "data.path=none.jsonl is not a file",
    "logger.project=a/b": "logger.project=a/b is not allowed",
}


@pytest.mark.parametrize("mistake", only(["gama=3"], MISTAKES))
def test_a_mistake_is_told_before_torch_is_loaded(mistake, tmp_path):
    found, said = loaded(tmp_path, *mistake.split())
    assert MISTAKES[mistake] in said and found == "[]"


@pytest.mark.parametrize("command", only(["report nowhere"], ["report nowhere", "alpha nowhere"]))
def test_a_folder_that_is_not_there_is_told_before_torch_is_loaded(command, tmp_path):
    module, *arguments = command.split()
    found, said = loaded(tmp_path, *arguments, module=f"specbench.{module}")
    assert "nowhere" in said and found == "[]"


@pytest.mark.parametrize(("module", "drafters"), [("specbench", "ngram"), ("specbench.compare", "ngram,suffix")])
def test_a_hub_that_does_not_answer_is_told_before_torch_is_loaded(module, drafters, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    found, said = loaded(tmp_path, "target.path=somebody/none", f"drafter={drafters}", module=module)
    assert "target.path=somebody/none is not on this machine" in said and found == "[]"


@pytest.mark.parametrize("guarded", [True, False])  # False is the negative control
def test_a_command_whose_reader_is_gone_ends_without_a_word(guarded):
    body = "for _ in range(10**5): print('a line')"
    code = f"from specbench.errors import answering\nwith answering():\n  {body}" if guarded else body
    started = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert started.stdout.readline() == "a line\n"
    started.stdout.close()
    said = started.stderr.read()
    assert (started.wait(), said) == (141, "") if guarded else "BrokenPipeError" in said


def test_help_is_answered_without_torch(tmp_path):
    found, told = loaded(tmp_path, "--help", code=0)
    assert found == "[]" and "prompt_lookup" in told and "python -m specbench drafter=llama1b" in told


@pytest.mark.slow
def test_what_needs_a_model_s_class_loads_torch(tmp_path):
    """The negative control of the tests above."""
    found, said = loaded(tmp_path, "drafter=ngram", "drafter.max_order=x")
    assert "drafter.max_order=x is not allowed" in said and "torch" in found


def test_groups_are_those_of_the_configuration():
    """Two lists that are written by hand: GROUPS, and the defaults of config.yaml."""
    defaults = OmegaConf.load(conf_dir() / "config.yaml").defaults
    chosen = {str(key) for entry in defaults if entry != "_self_" for key in entry if "override" not in str(key)}
    assert chosen - {"experiment"} == set(GROUPS)
    for group in GROUPS:
        assert base_of(group).__module__ == GROUPS[group].rpartition(".")[0]
    assert set(RunConfig.model_fields) | set(GROUPS) <= set(known_keys([]))


def test_a_command_under_a_profiler_leaves_its_profile(tmp_path):
    call = [sys.executable, "-m", "cProfile", "-o", "profile", "-m", "specbench", "--version"]
    done = subprocess.run(call, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.stdout.startswith("specbench ") and (tmp_path / "profile").stat().st_size
