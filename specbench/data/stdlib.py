"""The default prompts: beginnings of functions and of documentation strings of Python's standard library.

They come from modules that the shipped pair was not trained on, and are the same for every run of one Python version.
The other modules are what it is trained on (`experiments/train_pair`), and what the count drafters are fitted on.
"""

import ast
import hashlib
import os
import re
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import Field

from specbench.data.prompts import Data, Prompt
from specbench.errors import ConfigError
from specbench.settings import BaseSettings

SIGNATURE = re.compile(r"^\s*(async )?def \w+\(.*\).*:\s*$")
LINES_BEFORE = 8  # lines of a prompt
# Tests are not library code; the last two are tables and manual pages, not Python.
EXCLUDED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
EXCLUDED_FOLDERS |= {"encodings", "pydoc_data"}
HELD_OUT_ONE_IN = 16


def is_held_out(module: str) -> bool:
    """True for about one module in 16, by a hash of its path, the same on every machine."""
    digest = hashlib.sha256(module.encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0


@cache
def read_modules(*, held_out: bool) -> dict[str, str]:
    """Source text by module path (posix, relative to the library), sorted: the training text, or what is held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    modules = {}
    for path in sorted(_files(root)):
        relative = path.relative_to(root)
        if is_held_out(relative.as_posix()) != held_out:
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if text.strip():
            modules[relative.as_posix()] = text
    return modules


def _files(root: Path) -> Iterator[Path]:
    """The Python files below a folder, without looking into `EXCLUDED_FOLDERS`, which may be large."""
    for folder, inside, names in os.walk(root):
        inside[:] = [name for name in inside if name not in EXCLUDED_FOLDERS]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def functions(text: str) -> Iterator[int]:
    """Numbers of the lines that begin a function, counted from 0."""
    return (number for number, line in enumerate(text.splitlines()) if SIGNATURE.match(line))


def documentation(text: str) -> Iterator[int]:
    """Numbers of the middle lines, counted from 0, of documentation strings of at least eight lines."""
    try:
        nodes = [*ast.walk(ast.parse(text))]
    except SyntaxError:  # of the library's files that are broken on purpose
        return
    for node in nodes:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(node):
            begin, end = node.body[0].lineno, node.body[0].end_lineno or 0
            if end - begin >= 8:
                yield (begin + end) // 2 - 1


ENDS = {"python": functions, "prose": documentation}


class StdlibData(Data):
    """`count` prompts of 8 lines, ending with a function's first line (python), in a documentation string, or mixed."""

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
    """The prompts of a kind, their category: one of each held-out module in a hashed order, then a second of each."""
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
