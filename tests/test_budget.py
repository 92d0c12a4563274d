"""The house has a budget: lines of code and of tests, words of the README and of the hand-written pages."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
# A feature enters when another leaves.
LINES_OF_CODE = 20_000
LINES_OF_TESTS = 15_000
WORDS_OF_README = 600
WORDS_OF_DOCS = 7_500


def tracked(*patterns: str) -> list[Path]:
    """The tracked files that match one of the patterns and are there."""
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).is_file()]


def lines(files: list[Path]) -> int:
    return sum(len(file.read_text().splitlines()) for file in files)


def words(files: list[Path]) -> int:
    return sum(len(file.read_text().split()) for file in files)


def test_lines_of_code():
    assert 0 < lines(tracked("specbench/*.py")) <= LINES_OF_CODE


def test_lines_of_tests():
    assert 0 < lines(tracked("tests/*.py")) <= LINES_OF_TESTS


def test_words_of_the_readme_and_the_pages():
    assert 0 < words([ROOT / "README.md"]) <= WORDS_OF_README
    assert 0 < words(tracked("docs/*.md")) - words(tracked("docs/reference/*.md")) <= WORDS_OF_DOCS
