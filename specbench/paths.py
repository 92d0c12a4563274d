"""Folders: configurations, shipped models, and the names of run folders."""

import hashlib
import re
from pathlib import Path

LONGEST = 120  # characters of a folder name
SHIPPED = Path(__file__).resolve().parent / "shipped"  # the models that come with the package


def fields(override_dirname: str) -> str:
    """The overrides, `gamma=5,temperature=0`, as a folder name; `default` if there are none."""
    name = re.sub(r"[^\w.,=+-]+", "_", override_dirname)
    if len(name) > LONGEST:
        name = name[:LONGEST] + "-" + hashlib.sha256(override_dirname.encode()).hexdigest()[:8]
    return name or "default"


def conf_dir() -> Path:
    """The folder `conf/`: beside the package in a checkout, inside it in an installed wheel."""
    package = Path(__file__).resolve().parent
    return package / "conf" if (package / "conf").is_dir() else package.parent / "conf"
