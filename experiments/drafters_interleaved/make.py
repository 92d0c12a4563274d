"""Which drafter is faster: each prompt decoded by all of them in turn. All else is in ../drafters.

python -m specbench.compare experiment=drafters
python experiments/drafters_interleaved/make.py outputs/drafters
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import NUMBERS, RANKED, SPEEDUP, in_turn, make, number, option, text
from figures import measured

COLUMNS = {"drafter": option("drafter"), "temperature": "config/temperature", **NUMBERS}
TABLE = {"T": text("temperature"), "drafter": text("drafter"), "tau": number("tau"), "speedup": SPEEDUP, **RANKED}

if __name__ == "__main__":
    make(__file__, __doc__, in_turn(COLUMNS), TABLE, lambda rows: measured(rows, "drafter"))
