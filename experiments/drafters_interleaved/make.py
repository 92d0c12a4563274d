"""Which drafter is faster: each prompt decoded by all of them in turn. All else is in ../drafters.

python -m specbench.compare experiment=drafters
python experiments/drafters_interleaved/make.py outputs/drafters
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import ranking
from figures import measured

if __name__ == "__main__":
    ranking(__file__, __doc__, "drafter", measured)
