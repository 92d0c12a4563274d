"""Which verifier is faster: each prompt decoded by all of them in turn. All else is in ../verifiers.

python -m specbench.compare experiment=verifiers
python experiments/verifiers_interleaved/make.py outputs/verifiers
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import NUMBERS, RANKED, SPEEDUP, in_turn, make, number, option, text
from figures import measured

COLUMNS = {"verifier": option("verifier"), "temperature": "config/temperature", **NUMBERS}
TABLE = {"T": text("temperature"), "verifier": text("verifier"), "tau": number("tau"), "speedup": SPEEDUP, **RANKED}

if __name__ == "__main__":
    make(__file__, __doc__, in_turn(COLUMNS), TABLE, lambda rows: measured(rows, "verifier"))
