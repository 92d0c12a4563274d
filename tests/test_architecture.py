"""docs/architecture.md names what is there, and the generated pages are what the code gives."""

import importlib.util
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
SITTING = 3000  # lines of the reading order, at most
ENTRY_LINES = 12  # of a module at the top that only names a command

spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
generate = importlib.util.module_from_spec(spec)
spec.loader.exec_module(generate)
generate.modules_by_room = cache(generate.modules_by_room)


def section(title: str) -> str:
    """The text below a heading, up to the next one of the same level."""
    return re.search(rf"^## {re.escape(title)}$(.*?)(?=^## |\Z)", PAGE, re.M | re.S)[1]


def reading_order() -> list[Path]:
    rows = section("Read the loop in this order")
    return [ROOT / "specbench" / name for name in re.findall(r"^\| `([\w/]+\.py)` \| \S", rows, re.M)]


def floors() -> list[set[str]]:
    """Names in the first column of the table of rooms, by row."""
    table = section("Rooms").split("| folder |")[0]
    return [found for cell in re.findall(r"^\| ([^|]*) \|", table, re.M) if (found := {*re.findall(r"`(\w+)`", cell)})]


def rooms() -> set[str]:
    return set().union(*floors())


def test_the_loop_is_read_in_one_sitting():
    files = reading_order()
    assert len(files) > 15 and len(set(files)) == len(files)
    assert all(len(file.read_text().splitlines()) > 5 for file in files)
    assert sum(len(file.read_text().splitlines()) for file in files) < SITTING


def test_every_core_module_is_in_a_room_that_lists_it():
    for room, files in generate.modules_by_room().items():
        for path, sentence in files:
            lines = len((ROOT / "specbench" / path).read_text().splitlines())
            named = Path(path).stem in rooms() or path == "__init__.py"
            assert sentence, f"{path} has no docstring"
            assert room in rooms() or room.startswith("contrib/") or named or lines <= ENTRY_LINES, path
    assert "reference/modules.md" in section("Rooms")


def test_the_rooms_are_those_of_the_contract():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (entries, *rest) = [set(layer.split(" | ")) for layer in contracts[0]["layers"]]
    assert floors() == [{"__main__"}, *rest] and "__main__" in entries


def test_every_room_on_the_page_is_there():
    for name in rooms():
        assert any((ROOT / "specbench" / other).exists() for other in (name, f"{name}.py")), name


@pytest.mark.parametrize("name", generate.PAGES)
def test_a_generated_page_is_what_the_code_gives(name):
    assert (generate.REFERENCE / name).read_text() == generate.PAGES[name](), "run: python docs/generate.py"
