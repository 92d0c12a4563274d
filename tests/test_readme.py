"""What the README and --help tell people to type must work."""

import re
import shlex
from pathlib import Path

import pytest
import yaml
from conftest import composed
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser

from specbench.config.checks import check
from specbench.paths import conf_dir

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
HELP = yaml.safe_load((conf_dir() / "hydra" / "help" / "specbench.yaml").read_text())["header"]
COMMANDS = sorted(set(re.findall(r"^ *python -m specbench(?=\s|$)(.*?)(?:  |$)", README + "\n" + HELP, re.M)))


@pytest.mark.parametrize("arguments", COMMANDS)
def test_every_command_composes(arguments, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"question": "1 + 1?", "category": "math_reasoning", "turns": ["1 + 1?"]}\n')
    for placeholder, value in (("=P", "=shipped:target"), ("=Q", "=shipped:drafter"), ("=F", f"={file}")):
        arguments = re.sub(rf"{placeholder}(?=\s|$)", value, arguments)
    overrides = [word for word in shlex.split(arguments.split("#")[0]) if word != "-m"]
    for job in BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(overrides), None)[0]:
        check(composed(*job))


def test_there_are_commands():
    assert len(COMMANDS) > 10


def test_the_python_example_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code = re.search(r"```python\n(from hydra.*?)```", README, re.S)[1]
    small = code.replace('"logger=none"', '"logger=none", "data.limit=1", "max_new_tokens=8"')
    assert small != code
    exec(compile(small, "README.md", "exec"), {})
    assert "Estimate(mean=" in capsys.readouterr().out
