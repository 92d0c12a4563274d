"""What a cache costs, from the jobs of its multirun.

python -m specbench experiment=cache_backends
python experiments/cache_backends/make.py outputs/cache_backends
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import ENGINE, NUMBERS, Row, make, multirun, option, text
from figures import ways

NAMES = ("cache", "batch")
COLUMNS = {"cache": option("cache"), "batch": "config/batch_size", **NUMBERS}
TABLE = {name: text(name) for name in NAMES} | ENGINE


def order(row: Row) -> tuple[str, int]:
    """Caches by name, then by rows."""
    return row["cache"], row["batch"]


if __name__ == "__main__":
    make(__file__, __doc__, multirun(COLUMNS, order), TABLE, lambda rows: ways(rows, NAMES))
