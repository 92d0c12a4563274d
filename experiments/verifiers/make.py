"""Every verifier: what it accepts, what it costs and where its gain goes, from the jobs of the multirun.

python -m specbench experiment=verifiers
python experiments/verifiers/make.py outputs/verifiers
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import GAIN, NUMBERS, Row, make, multirun, option, text
from figures import measured_and_predicted

COLUMNS = {"verifier": option("verifier"), "temperature": "config/temperature", **NUMBERS}
TABLE = {"verifier": text("verifier")} | GAIN


def order(row: Row) -> tuple[float, float]:
    """By temperature, fastest first."""
    return row["temperature"], -row["speedup"]


if __name__ == "__main__":
    make(__file__, __doc__, multirun(COLUMNS, order), TABLE, lambda rows: measured_and_predicted(rows, "verifier"))
