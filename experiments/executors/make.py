"""What an executor gains, from the jobs of its multirun.

python -m specbench experiment=executors
python experiments/executors/make.py outputs/executors
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import ENGINE, NUMBERS, Row, make, multirun, option, text
from figures import ways

NAMES = ("executor", "temperature")
COLUMNS = {"executor": option("executor"), "temperature": "config/temperature", **NUMBERS}
TABLE = {name: text(name) for name in NAMES} | ENGINE
SLOWEST_FIRST = ("eager", "prepacked", "compiled", "cudagraph")


def order(row: Row) -> tuple[int, float]:
    """Executors by what they do, then temperatures."""
    return SLOWEST_FIRST.index(row["executor"]), row["temperature"]


if __name__ == "__main__":
    make(__file__, __doc__, multirun(COLUMNS, order), TABLE, lambda rows: ways(rows, NAMES))
