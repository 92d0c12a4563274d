"""Every verifier: what it accepts.

python -m specbench.compare experiment=verifiers data.limit=32
python experiments/verifiers/make.py outputs/verifiers
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import ACCEPTED, WITHOUT_TIMES, make, multirun, option, text
from figures import block_efficiency

COLUMNS = {"verifier": option("verifier"), "temperature": "config/temperature", **ACCEPTED}
TABLE = {"verifier": text("verifier")} | WITHOUT_TIMES


if __name__ == "__main__":
    collect = multirun(COLUMNS, lambda row: (row["temperature"], -row["tau"]))
    make(__file__, __doc__, collect, TABLE, lambda rows: block_efficiency(rows, "verifier"))
