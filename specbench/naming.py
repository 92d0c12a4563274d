"""Folder names of runs, from the overrides that make them different."""

import hashlib
import re

LONGEST = 120  # characters


def fields(override_dirname: str) -> str:
    """`gamma=5,temperature=0` as a folder name; `default` when nothing was overridden."""
    name = re.sub(r"[^\w.,=+-]+", "_", override_dirname)
    if len(name) > LONGEST:
        name = name[:LONGEST] + "-" + hashlib.sha256(override_dirname.encode()).hexdigest()[:8]
    return name or "default"
