"""Writes files so that a reader never sees half of one."""

import json
import os
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Writes under a temporary name, then renames."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def write_json(path: Path, value: Any) -> None:
    """Writes indented JSON, as `write_text` does."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")
