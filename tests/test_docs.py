"""What the README, the pages and --help tell people to type works, and the pages name what is there.

Every `python -m specbench` line of a fenced block is composed and checked, and the README's are run on one prompt. A
line that ends with `# not run here: REASON` is composed only.
"""

import importlib.util
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from small_runs import LITTLE, composed, short_prompts, training

from specbench.config.check import check
from specbench.report import __main__ as report
from specbench.run import command, compare

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": (ROOT / "README.md").read_text()}
PAGES |= {f"docs/{path.name}": path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}
SMALL = ("data.limit=1", "max_new_tokens=6", "logger=none")


@dataclass(frozen=True)
class Command:
    """`python -m specbench<module> <words>`, and whether it is run here."""

    module: str
    words: tuple[str, ...]
    is_run: bool

    def __str__(self) -> str:
        return f"specbench{self.module} {shlex.join(self.words)}".strip()


def shell_of(text: str) -> str:
    """The fenced blocks of a page that hold commands."""
    blocks = re.findall(r"^```([^\n]*)\n(.*?)^```$", text, re.M | re.S)
    return "".join(content for language, content in blocks if language in ("", "sh", "bash"))


def commands_of(text: str) -> list[Command]:
    """The commands of the fenced blocks of a page."""
    found = []
    for line in shell_of(text).splitlines():
        if match := re.match(r"python -m specbench(\.\w+)?(?=\s|$)(.*)", line):
            words = tuple(word for word in shlex.split(match[2], comments=True) if word != "-m")
            found.append(Command(match[1] or "", words, "# not run here: " not in line))
    return found


COMMANDS = {str(found): found for text in PAGES.values() for found in commands_of(text)}
OF_README = {str(found): found for found in commands_of(PAGES["README.md"])}
RUNS = [found for found in COMMANDS.values() if found.module == "" and "--help" not in found.words]


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """The folder in which everything is typed: it holds the files of docs/extending.md and some prompts."""
    folder = tmp_path_factory.mktemp("typed")
    (folder / "prompts.jsonl").write_text('{"question": "1 + 1?", "category": "math_reasoning", "turns": ["1 + 1?"]}\n')
    for name, content in re.findall(r'^```\w+ title="(.*?)"\n(.*?)^```$', PAGES["docs/extending.md"], re.M | re.S):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        yield folder


def filled(words, here) -> list[str]:
    """P and Q are models, F is a file of prompts."""
    values = {"P": LITTLE["target.path"], "Q": LITTLE["drafter.path"], "F": str(here / "prompts.jsonl")}
    return [re.sub(r"=([PQF])$", lambda found: f"={values[found[1]]}", word) for word in words]


def jobs_of(words: list[str]) -> list[list[str]]:
    """The jobs of a sweep; of a single run, itself."""
    if "--config-dir" in words:
        place = words.index("--config-dir")
        words = [*words[:place], *words[place + 2 :], f"hydra.searchpath=[file://{Path(words[place + 1]).resolve()}]"]
    return BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(words), None)[0]


@pytest.mark.parametrize("found", RUNS, ids=str)
def test_every_command_composes(found, here):
    jobs = jobs_of(filled(found.words, here))
    for job in (jobs[0], jobs[-1]):
        config = composed(*job)
        if found.is_run:  # others may need checkpoints that are not here
            check(config)


@pytest.mark.parametrize(
    "found", [own for own in COMMANDS.values() if own.module == ".train" and "--help" not in own.words], ids=str
)
def test_every_training_composes(found):
    assert training(*found.words).method._target_.startswith("specbench.train.")


@pytest.mark.parametrize("found", [own for own in COMMANDS.values() if own.module == ".compare"], ids=str)
def test_every_comparison_composes(found, here):
    words, also = list(found.words), []
    while "--also" in words:
        place = words.index("--also")
        also.append(words[place + 1])
        del words[place : place + 2]
    _, _, jobs = compare.jobs_of_comparison(filled(words, here), also)
    assert len(jobs) > 1


def small(words: list[str]) -> list[str]:
    """The words with few prompts and tokens, and with little models where they choose none."""
    keys = {word.partition("=")[0] for word in words}
    more = [word for word in SMALL if word.partition("=")[0] not in keys]
    if not any(key.startswith("data") for key in keys):
        more += ["data=jsonl", f"data.path={short_prompts()}"]
    if not any(key.startswith(("target", "drafter")) for key in keys):
        more += [f"{key}={value}" for key, value in LITTLE.items()]
    return [*words, *more]


@pytest.mark.parametrize("found", [own for own in OF_README.values() if own.module == "" and own.is_run], ids=str)
def test_the_readmes_commands_run(found, here, monkeypatch, tmp_path):
    words = small([f"{job}" for job in jobs_of(filled(found.words, here))[0]])
    monkeypatch.setattr(sys, "argv", ["specbench", *words, f"hydra.run.dir={tmp_path}"])
    command.main()
    files = {path.name for path in tmp_path.iterdir()}
    assert {"results.json", "prompts.jsonl", "rounds.parquet", "page.html"} <= files
    report.main([str(tmp_path), "--format", "csv"])


def test_the_examples_of_the_page_on_extending_run(here, monkeypatch, tmp_path):
    [found] = [own for own in COMMANDS.values() if "--config-dir" in own.words]
    words = small(list(found.words))
    monkeypatch.setattr(sys, "argv", ["specbench", *words, f"hydra.run.dir={tmp_path}"])
    command.main()
    assert (tmp_path / "results.json").is_file()


def test_no_command_is_missed():
    assert len(RUNS) > 20 and len(OF_README) > 8
    for name, text in PAGES.items():
        assert len(re.findall(r"python -m specbench\b", shell_of(text))) == len(commands_of(text)), name


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md"])
def test_every_file_that_a_page_names_is_there(page):
    text = (ROOT / page).read_text()
    for name in re.findall(r"`((?:specbench|conf|tests|experiments|docs)/[\w./-]*)`", text):
        assert (ROOT / name).exists(), name
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert ((ROOT / page).parent / link).exists(), link


def test_pages_are_short():
    for readme in (ROOT / "experiments").glob("*/README.md"):
        assert len(readme.read_text().split()) <= 250, readme


def test_the_rooms_of_the_page_on_architecture_are_those_of_the_contract():
    import tomllib

    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    rooms = {name.strip() for layer in contracts[0]["layers"] for name in layer.split("|")}
    table = PAGES["docs/architecture.md"]
    named = {
        name for cell in re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", table, re.M) for name in re.findall(r"`(\w+)`", cell)
    }
    assert {room for room in rooms if (ROOT / "specbench" / room).is_dir()} <= named


def generator():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["options.md", "results.md"])
def test_a_generated_page_is_what_the_code_gives(name):
    assert (ROOT / "docs" / "reference" / name).read_text() == generator().PAGES[name](), "run: python docs/generate.py"
