"""Every verifier: what it accepts, what it costs and where its gain goes, decoded prompt by prompt in turn.

python -m specbench.compare experiment=verifiers data.limit=32
python experiments/verifiers/make.py outputs/verifiers
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import GAIN, NUMBERS, RANKED, in_turn, make, option, text
from figures import measured_and_predicted

COLUMNS = {"verifier": option("verifier"), "temperature": "config/temperature", **NUMBERS}
TABLE = {"verifier": text("verifier")} | RANKED | GAIN


if __name__ == "__main__":
    make(__file__, __doc__, in_turn(COLUMNS), TABLE, lambda rows: measured_and_predicted(rows, "verifier"))
