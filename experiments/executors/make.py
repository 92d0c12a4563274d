"""What an executor gains, each prompt decoded by all of them in turn.

python -m specbench.compare experiment=executors
python experiments/executors/make.py outputs/executors
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import ENGINE, NUMBERS, RANKED, in_turn, make, option, text
from figures import ways

NAMES = ("executor", "temperature")
COLUMNS = {"executor": option("executor"), "temperature": "config/temperature", **NUMBERS}
TABLE = {name: text(name) for name in NAMES} | RANKED | ENGINE

if __name__ == "__main__":
    make(__file__, __doc__, in_turn(COLUMNS), TABLE, lambda rows: ways(rows, NAMES))
