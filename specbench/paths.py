"""Where the configurations and the shipped models are, and what the folders of runs are called."""

import hashlib
import re
from pathlib import Path

LONGEST = 120  # characters
SHIPPED = Path(__file__).resolve().parent / "shipped"  # the models that come with the package


def fields(override_dirname: str) -> str:
    """`gamma=5,temperature=0` as a folder name; `default` when nothing was overridden."""
    name = re.sub(r"[^\w.,=+-]+", "_", override_dirname)
    if len(name) > LONGEST:
        name = name[:LONGEST] + "-" + hashlib.sha256(override_dirname.encode()).hexdigest()[:8]
    return name or "default"


def conf_dir() -> Path:
    """`conf/` beside the package in a checkout, inside it in an installed wheel."""
    package = Path(__file__).resolve().parent
    return package / "conf" if (package / "conf").is_dir() else package.parent / "conf"
