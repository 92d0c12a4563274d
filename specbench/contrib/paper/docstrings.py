"""Functions of Python's standard library as inputs of a summary: the body is the prompt."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from pydantic import Field

from specbench.data.prompts import Data, Prompt
from specbench.data.sources import of_python
from specbench.data.stdlib import nodes_of
from specbench.data.stdlib_corpus import read_modules
from specbench.settings import BaseSettings

SHORTEST, LONGEST = 3, 40  # lines of a function without its documentation


@dataclass(frozen=True)
class Documented:
    """A function."""

    name: str  # module:line
    body: str  # its source without the documentation string
    summary: str  # the first paragraph of that, in one line


class DocstringData(Data):
    """Functions of the modules that nothing is trained on, without their documentation strings: what a summary is to
    be written of. Functions that the other modules have, too, are left out. `experiments/train_docstrings` trains a
    pair that does."""

    class Settings(BaseSettings):
        limit: int | None = Field(ge=1)

        def sources(self) -> Mapping[str, str]:
            return {"python": of_python()}

    def __init__(self, limit: int | None):
        self.limit = limit

    def prompts(self) -> Iterator[Prompt]:
        return (Prompt(pair.name, (pair.body,)) for pair in pairs(held_out=True) if not trained_on(pair))


def trained_on(pair: Documented) -> bool:
    """True if the modules that are not held out have the summary of a function, or each line of its body; white space
    aside."""
    text, lines = training_text()
    return pair.summary in text or all(line.strip() in lines for line in pair.body.splitlines())


@cache
def training_text() -> tuple[str, frozenset[str]]:
    """The modules that are not held out: with single spaces, and as a set of lines without margins."""
    modules = read_modules(held_out=False).values()
    lines = frozenset(line.strip() for text in modules for line in text.splitlines())
    return " ".join(word for text in modules for word in text.split()), lines


def pairs(*, held_out: bool) -> Iterator[Documented]:
    """The documented functions of at least three lines and at most 40, module by module."""
    for module, text in read_modules(held_out=held_out).items():
        lines = text.splitlines()
        for node in nodes_of(text, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if found := documented(node, lines):
                yield Documented(f"{module}:{node.lineno}", *found)


def documented(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> tuple[str, str] | None:
    """Body and summary of a function; None if it has no documentation, or is too short or too long."""
    told, text = ast.get_docstring(node), node.body[0]
    end, own_end = node.end_lineno or 0, text.end_lineno or 0
    if not told or text.lineno == node.lineno:
        return None
    kept = lines[node.lineno - 1 : text.lineno - 1] + lines[own_end:end]
    if not SHORTEST <= len(kept) <= LONGEST:
        return None
    margin = len(kept[0]) - len(kept[0].lstrip())
    body = "\n".join(line[min(margin, len(line) - len(line.lstrip())) :] for line in kept)
    return body, " ".join(told.split("\n\n")[0].split())
