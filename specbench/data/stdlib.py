"""The default prompts: beginnings of functions and of documentation strings of Python's standard library.

They come from modules that the shipped pair was not trained on, and are the same for every run of one Python version.
"""

import ast
import hashlib
import re
from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from specbench.data.prompts import Data, Prompt
from specbench.data.stdlib_corpus import read_modules
from specbench.errors import ConfigError
from specbench.settings import BaseSettings

SIGNATURE = re.compile(r"^\s*(async )?def \w+\(.*\).*:\s*$")
LINES_BEFORE = 24  # lines of a prompt


def functions(text: str) -> Iterator[int]:
    """Numbers of the lines that begin a function, counted from 0."""
    return (number for number, line in enumerate(text.splitlines()) if SIGNATURE.match(line))


def documentation(text: str) -> Iterator[int]:
    """Numbers of the middle lines of documentation strings of at least eight lines, counted from 0; none of the
    library's files that are broken on purpose."""
    try:
        nodes = [*ast.walk(ast.parse(text))]
    except SyntaxError:
        return
    for node in nodes:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(node):
            begin, end = node.body[0].lineno, node.body[0].end_lineno or 0
            if end - begin >= 8:
                yield (begin + end) // 2 - 1


ENDS = {"python": functions, "prose": documentation}


class StdlibData(Data):
    """`count` prompts of 24 lines. Those of kind python end with the first line of a function, those of kind prose
    inside a documentation string; mixed alternates them."""

    class Settings(BaseSettings):
        limit: int | None = Field(ge=1, le=10**9)
        count: int = Field(ge=1, le=10**9)
        kind: Literal["python", "prose", "mixed"]

    def prompts(self) -> Iterator[Prompt]:
        s = self.settings
        each = [take(kind) for kind in (("python", "prose") if s.kind == "mixed" else (s.kind,))]
        found = [prompt for prompts in zip(*each, strict=False) for prompt in prompts]
        if s.count > len(found):
            raise ConfigError(
                f"data.count={s.count} is not possible: this Python's standard library has {len(found)} prompts of "
                f"data.kind={s.kind}"
            )
        return iter(found[: s.count])


def take(kind: str) -> list[Prompt]:
    """The prompts of a kind, which is their category, from the held-out modules: one prompt of each module, in a hashed
    order, then a second one of each, and so on."""
    ends, found = ENDS[kind], []
    for module, text in read_modules(held_out=True).items():
        lines = text.splitlines()
        names = {f"{module}:{number + 1}": number for number in ends(text) if number >= LINES_BEFORE}
        hashed = sorted((hashlib.sha256(name.encode()).hexdigest(), name) for name in names)
        for rank, (digest, name) in enumerate(hashed):
            # No line break at the end: the tokenizer joins it with the indentation that follows.
            before = lines[names[name] + 1 - LINES_BEFORE : names[name] + 1]
            found.append((rank, digest, Prompt(name, ("\n".join(before),), kind)))
    return [prompt for _, _, prompt in sorted(found, key=lambda entry: entry[:2])]
