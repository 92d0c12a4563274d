"""Files that a reader never sees half written."""

import json
import os
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Writes under a temporary name and renames, so that a reader never sees half a file."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def write_json(path: Path, value: Any) -> None:
    """As `write_text`, indented."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")
