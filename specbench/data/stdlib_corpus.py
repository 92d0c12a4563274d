"""Python's own standard library as a corpus, which every machine that runs specbench has.

The shipped pair is trained on it (`experiments/train_pair`), the count drafters are fitted on it, and `data=stdlib`
cuts its prompts from the modules that training never saw.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

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
    """Source text by module path (posix, relative to the library), sorted by path: the training text, or what prompts
    and perplexity come from."""
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
