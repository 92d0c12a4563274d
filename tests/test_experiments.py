"""The makers of experiments/: each one reads the numbers that stand beside it, and its README says how to make them."""

import importlib.util
import re
import shlex
import sys
from pathlib import Path

import matplotlib
import pytest

ROOT = Path(__file__).parents[1] / "experiments"
MAKERS = sorted(path.parent.name for path in ROOT.glob("*/make.py"))
STORED = [name for name in MAKERS if (ROOT / name / "results.csv").exists()]


@pytest.fixture
def maker(monkeypatch):
    """Imports a folder's make.py."""
    monkeypatch.syspath_prepend(str(ROOT))
    matplotlib.use("Agg")

    def load(name):
        spec = importlib.util.spec_from_file_location(f"make_{name}", ROOT / name / "make.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    yield load
    for name in ("common", "figures"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", STORED)
def test_a_maker_shows_the_numbers_beside_it(name, maker):
    module = maker(name)
    common = sys.modules["common"]
    rows = common.read_rows(ROOT / name / "results.csv")
    if not hasattr(module, "TABLE"):
        pytest.skip("it has tables of its own")
    lines = common.to_markdown(rows, module.TABLE).splitlines()
    assert len(lines) == len(rows) + 2 and lines[0].count("|") > 3
    assert "nan" not in "".join(lines)


@pytest.mark.parametrize("name", MAKERS)
def test_the_command_of_a_readme_is_that_of_its_maker(name, maker):
    """The words after `make.py` are the same in the README's header and in the maker's own text, and so is the command
    that measures."""
    readme = re.search(r"^Command: (.*)$", (ROOT / name / "README.md").read_text(), re.M)[1]
    assert f"experiments/{name}/make.py" in readme
    module = maker(name)
    typed = re.findall(rf"^ *python experiments/{name}/make\.py(.*)$", module.__doc__ or "", re.M)
    assert typed and shlex.split(typed[0]) == shlex.split(readme.partition(f"experiments/{name}/make.py")[2])
    modules = re.findall(r"^ *python -m (specbench\S*) ", module.__doc__ or "", re.M)
    assert all(f"python -m {name} " in readme for name in modules)


def test_the_command_that_makes_all_runs_what_the_readmes_say(maker):
    """Measurements first, since makers change the checkout, and every maker once."""
    made = maker(".")
    found = [shlex.join(words) for _, words in made.commands(made.STEPS)]
    makers = [words for words in found if not words.startswith("-m ")]
    assert found == [words for words in found if words.startswith("-m ")] + makers
    for step, words in zip(made.STEPS, makers, strict=True):
        commands = [f"python -m {measure}" for measure in step.measure.values()]
        assert (
            f"Command: {' && '.join([*commands, f'python {words}'])}\n"
            in (ROOT / step.folder / "README.md").read_text()
        )
