"""specbench beside transformers' own ways of decoding, from the jobs of the multirun.

python -m specbench experiment=vs_transformers executor=prepacked data.limit=16
python experiments/vs_transformers/make.py outputs/vs_transformers
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import ENGINE, NUMBERS, Row, make, multirun, option, text
from figures import ways

NAMES = ("executor", "temperature")
COLUMNS = {"executor": option("executor"), "temperature": "config/temperature", **NUMBERS}
TABLE = {name: text(name) for name in NAMES} | ENGINE


def order(row: Row) -> tuple[bool, float]:
    """What needs no compilation first, then by temperature."""
    return row["executor"] != "prepacked", row["temperature"]


if __name__ == "__main__":
    make(__file__, __doc__, multirun(COLUMNS, order), TABLE, lambda rows: ways(rows, NAMES))
