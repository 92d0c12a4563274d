"""The default prompts: functions of the standard library whose bodies are to be written.

They come from modules that the shipped pair was not trained on, and are the same for every run
of one Python version.
"""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

from specbench.data.prompts import Prompt
from specbench.data.stdlib_corpus import read_modules
from specbench.settings import setting

SIGNATURE = re.compile(r"^\s*(async )?def \w+\(.*\).*:\s*$")
LINES_BEFORE = 24


class StdlibData:
    """`count` prompts: up to 24 lines that end with the first line of a function."""

    @dataclass
    class Settings:
        limit: int | None = setting(ge=1)
        count: int = setting(ge=1)

    def __init__(self, settings: Settings):
        self.limit, self.count = settings.limit, settings.count

    def prompts(self) -> Iterator[Prompt]:
        return iter([prompt for _, _, prompt in sorted(candidates(), key=lambda c: c[:2])[: self.count]])


def candidates() -> Iterator[tuple[int, str, Prompt]]:
    """Every function of the held-out modules: how many of its module come before it, then a hash.

    Sorting by both takes one function of each module, in no particular order, then a second one.
    """
    for module, text in read_modules(held_out=True).items():
        lines = text.splitlines()
        names = {
            f"{module}:{number + 1}": number
            for number, line in enumerate(lines)
            if number >= LINES_BEFORE and SIGNATURE.match(line)
        }
        hashed = sorted((hashlib.sha256(name.encode()).hexdigest(), name) for name in names)
        for rank, (digest, name) in enumerate(hashed):
            number = names[name]
            # No line break at the end: the tokenizer joins it with the indentation that follows.
            before = "\n".join(lines[number + 1 - LINES_BEFORE : number + 1])
            yield rank, digest, Prompt(name, (before,), "python")
