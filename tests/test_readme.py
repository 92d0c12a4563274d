"""What the README, the pages of docs/ and --help tell people to type must work.

Every `python -m specbench` line of a fenced block is composed and checked, and run on one prompt. A line that ends with
`# not run here: REASON` is composed and checked only.
"""

import dataclasses
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from choosing import slow_unless
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from small_runs import LITTLE, composed, given_by, little, short_prompts, steady, training

import specbench.contrib.planning.command as plan
import specbench.contrib.replay.command as replay
import specbench.results.report.command as report
import specbench.run.command as command
import specbench.run.compare_command as compare
from specbench.config.paths import conf_dir
from specbench.config.validate import check
from specbench.results import table_command as table

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DOCS = {path.relative_to(ROOT / "docs").as_posix(): path.read_text() for path in sorted((ROOT / "docs").rglob("*.md"))}
PAGES = [README, *DOCS.values()]
HELP = yaml.safe_load((conf_dir() / "hydra" / "help" / "specbench.yaml").read_text())
NOT_RUN_OF_HELP = {  # its lines have no room for a comment
    "drafter=llama1b gamma=5": "gated weights",
    "baseline=transformers executor=compiled": "compiles for half a minute",
    "drafter=llama1b target.weights=random drafter.weights=random verifier=synthetic": "some 13 GB of memory",
}
SHELL = ("", "sh", "bash", "console")  # languages of fenced blocks with commands
SMALL = {"data.limit": "1", "max_new_tokens": "6"}
RUN = "RUN"  # stands for a finished run's folder


@dataclasses.dataclass(frozen=True)
class Command:
    """`python -m specbench<module> <words>`, and whether a test runs it."""

    module: str
    words: tuple[str, ...]
    is_run: bool

    def __str__(self) -> str:
        return f"specbench{self.module} {shlex.join(self.words)}".strip()


def fenced(text: str) -> list[tuple[str, str]]:
    """(info line, content) of every fenced block."""
    return re.findall(r"^```([^\n]*)\n(.*?)^```$", text, re.M | re.S)


def commands_of_a_page(text: str) -> Iterator[Command]:
    for info, content in fenced(text):
        if info.strip() not in SHELL:
            continue
        for line in content.splitlines():
            if found := re.match(r" *python -m specbench(\.\w+)?(?=\s|$)(.*)", line):
                is_run = re.search(r"# not run here: \S", line) is None
                yield Command(found[1] or "", words_of(found[2]), is_run)


def commands_of_help() -> Iterator[Command]:
    """Descriptions follow after two spaces; the footer's commands stand in sentences."""
    for module, text in re.findall(r"^ *python -m specbench(\.\w+)?(?=\s|$)(.*?)(?:  |$)", HELP["header"], re.M):
        yield Command(module, words_of(text), text.strip() not in NOT_RUN_OF_HELP)
    for module, folder in re.findall(r"python -m specbench(\.\w+) (outputs/\S+)", HELP["footer"]):
        yield Command(module, words_of(folder), True)


def words_of(text: str) -> tuple[str, ...]:
    """As a shell splits them. Folders of runs are all the same: one small run stands for each."""
    words = shlex.split(text, comments=True)
    return tuple(RUN if word.startswith("outputs/") else word for word in words if word != "-m")


FOUND = [found for page in PAGES for found in commands_of_a_page(page)] + [*commands_of_help()]
COMMANDS = sorted(set(FOUND), key=str)
# One of each spelling, though a page may run what another only shows: the order of a set must not choose between them.
BY_WORDS = {str(c): c for c in sorted(COMMANDS, key=lambda c: c.is_run)}
COMPOSED = [c for c in BY_WORDS.values() if c.module in ("", ".train") and "--help" not in c.words]
OF_README = {*commands_of_a_page(README)}
SHOWN = {str(c) for c in (*OF_README, *commands_of_help())}
RUNS = [c for c in COMMANDS if c.module == "" and c.is_run]
ARGPARSE = (".compare", ".plan")
COMMANDS_ON_A_RUN = {".replay": (replay.main, "replay.json"), ".report": (report.main, "report.html"),
                     ".table": (table.main, "")}  # fmt: skip
ON_A_RUN = [c for c in COMMANDS if c.module in COMMANDS_ON_A_RUN and (c.is_run or c.module == ".table")]


def titled() -> dict[str, str]:
    """The files that docs/adding_a_part.md shows, by path."""
    shown = ((re.search(r'title="(.*?)"', info), content) for info, content in fenced(DOCS["adding_a_part.md"]))
    return {title[1]: content for title, content in shown if title}


def put(files: dict[str, str], folder: Path) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Iterator[Path]:
    """The folder in which everything is typed: it holds the files of docs/adding_a_part.md and some prompts."""
    prompts = '{"question": "1 + 1?", "category": "math_reasoning", "turns": ["1 + 1?"]}\n'
    folder = put(titled() | {"prompts.jsonl": prompts}, tmp_path_factory.mktemp("typed"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        yield folder


def filled(words: tuple[str, ...], here: Path) -> list[str]:
    """P and Q are models, F is a file of prompts; what Hydra reads of its own stands apart."""
    values = {"P": LITTLE["target.path"], "Q": LITTLE["drafter.path"], "F": str(here / "prompts.jsonl")}
    return [re.sub(r"=([PQF])$", lambda found: f"={values[found[1]]}", word) for word in words]


def apart(words: list[str]) -> tuple[list[str], list[str]]:
    """Flags, and overrides."""
    if "--config-dir" not in words:
        return [], words
    place = words.index("--config-dir")
    return words[place : place + 2], words[:place] + words[place + 2 :]


def composed_with(flags: list[str], overrides: list[str]):
    """The configuration that the command line would compose."""
    more = [f"hydra.searchpath=[file://{Path(flags[1]).resolve()}]"] if flags else []
    return composed(*overrides, *more)


def jobs_of(flags: list[str], overrides: list[str]) -> list[list[str]]:
    """The jobs of a sweep, also of one that an experiment names; of a single run, itself."""

    def split(words: list[str]) -> list[list[str]]:
        return BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(words), None)[0]

    if any(word.startswith("experiment=") for word in overrides):
        params = composed_with(flags, split(overrides)[0]).hydra.sweeper.params
        return split([*(f"{key}={value}" for key, value in params.items()), *overrides])
    return split(overrides)


def with_new_words(jobs: list[list[str]]) -> Iterator[list[str]]:
    """The jobs of a sweep with a value that none before them has."""
    seen: set[str] = set()
    for job in jobs:
        if not seen or not seen >= set(job):
            yield job
        seen |= set(job)


@pytest.mark.parametrize("found", [slow_unless(str(found) in SHOWN, found) for found in COMPOSED], ids=str)
def test_every_command_composes(found, here):
    flags, overrides = apart(filled(found.words, here))
    if found.module == ".train":  # tests/contrib/training runs every method
        assert training(*overrides).method._target_.startswith("specbench.contrib.training.")
        return
    for job in with_new_words(jobs_of(flags, overrides)):
        check(composed_with(flags, job))


@pytest.mark.parametrize("found", [
    slow_unless(str(c) in SHOWN or any("--" in word for word in c.words), c) for c in COMMANDS if c.module in ARGPARSE
], ids=str)  # fmt: skip
def test_every_comparison_and_plan_composes(found, here):
    parser = {".compare": compare.comparison_parser, ".plan": plan.plan_parser}[found.module]()
    args = parser.parse_intermixed_args(found.words)
    if found.module == ".plan":
        plan.refuse_impossible(args.overrides)
    elif RUN not in found.words:
        assert len(compare.expected(args.inputs, args.also)[1].jobs) > 1


@pytest.fixture(scope="module")
def run_small(here):
    """Runs a command's first job on one prompt, in this process; the same one once. Returns the run's folder."""
    done: dict[tuple[str, ...], Path] = {}

    def run(words: tuple[str, ...]) -> Path:
        flags, overrides = apart(filled(words, here))
        job = [word for word in jobs_of(flags, overrides)[0] if word.split("=")[0] not in SMALL]
        small = [f"{key}={value}" for key, value in SMALL.items()]
        small += [] if any(word.startswith("logger=") for word in job) else ["logger=none"]
        if not flags and not any(word.startswith(("experiment=", "decoding=")) for word in job):
            if not any(word.startswith("data") for word in job):
                small += ["data=jsonl", f"data.path={short_prompts()}"]
            small += [f"{key}={value}" for key, value in little(given_by(job)).items()]
        typed = (*flags, *sorted([*job, *small]))
        if typed not in done:
            out = here / f"out{len(done)}"
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(sys, "argv", ["specbench", *typed, "hydra.mode=RUN", f"hydra.run.dir={out}"])
                command.main()
            done[typed] = out
        return done[typed]

    return run


def is_short(found: Command) -> bool:
    """The README's; but repeats are processes of their own, which tests/run/test_repeats.py has, and gamma=2 alone is
    like a sweep's job."""
    return (
        found in OF_README
        and not any(word.startswith("repeats=") for word in found.words)
        and found.words != ("gamma=2",)
    )


@pytest.mark.parametrize("found", [slow_unless(is_short(found), found) for found in RUNS], ids=str)
def test_every_command_runs(found, run_small):
    folder = run_small(found.words)
    assert {"results.json", "rounds.parquet", "prompts.jsonl"} <= {path.name for path in folder.iterdir()}


@pytest.mark.parametrize(
    "found", [slow_unless(found in OF_README and found.module != ".report", found) for found in ON_A_RUN], ids=str
)
def test_every_command_on_a_finished_run_runs(found, run_small, capsys):
    main, left = COMMANDS_ON_A_RUN[found.module]
    folder = run_small(())
    if any(word.startswith("cost=") for word in found.words):
        left = ""  # a table of loads, which is printed
    if left:
        (folder / left).unlink(missing_ok=True)
    main([str(folder) if word == RUN else word for word in found.words])
    told = capsys.readouterr().out
    assert (
        (folder / left).stat().st_size > 0
        if left
        else "block efficiency" in told or "accepted" in told or "best gamma" in told
    )


@pytest.fixture(scope="module", autouse=True)
def steady_machine():
    """Replay needs one, and more rounds than these runs have."""
    with steady():
        yield


def test_no_command_is_missed():
    assert len(RUNS) > 15 and len(ON_A_RUN) > 2
    for page in PAGES:
        shell = "\n".join(content for info, content in fenced(page) if info.strip() in SHELL)
        assert len(re.findall(r"python -m specbench\b", shell)) == len([*commands_of_a_page(page)])
    told = [" ".join(found.words) for found in commands_of_help()]
    assert set(NOT_RUN_OF_HELP) <= set(told)
    own = {".advise", ".alpha", ".collect", ".gpu_check", ".train"}  # tests/contrib
    known = {"", *own, *ARGPARSE, *COMMANDS_ON_A_RUN}
    assert {found.module for found in FOUND} <= known


@pytest.mark.slow  # tests/run/test_from_python.py has most of it
def test_the_python_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code = "\n".join(content for info, content in fenced(DOCS["python.md"]) if info == "python")
    words = ("temperature=0", "data.limit=1", "max_new_tokens=8", "gamma=2", "data=jsonl",
             f"data.path={short_prompts()}", "target.path=shipped:drafter", "drafter.path=counted.txt")  # fmt: skip
    Path("counted.txt").write_text(README)  # all of the standard library takes long
    few = ", ".join(f'"{word}"' for word in words)
    small = code.replace('"temperature=0"', few)
    assert small != code
    exec(compile(small, "docs/python.md", "exec"), {})
    told = capsys.readouterr().out
    equation_1 = sum(0.8**i for i in range(6))
    assert "tokens in" in told and "report.html" in told and f"\n{equation_1:.5f}" in told
    assert {"results.json", "config.yaml", "prompts.jsonl"} <= {path.name for path in (tmp_path / "out").iterdir()}


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 120 and len(README.split()) <= 1000
    assert max(map(len, README.splitlines())) <= 120


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", *(f"docs/{name}" for name in DOCS)])
def test_every_file_that_a_page_names_is_there(page):
    text = (ROOT / page).read_text()
    for name in re.findall(r"`((?:specbench|conf|tests|experiments|docs)/[\w./-]*)`", text):
        assert "NAME" in name or (ROOT / name).exists(), name
