"""Which verifier is faster: each prompt decoded by all of them in turn. All else is in ../verifiers.

python -m specbench.compare experiment=verifiers
python experiments/verifiers_interleaved/make.py outputs/verifiers
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import ranking
from figures import measured

if __name__ == "__main__":
    ranking(__file__, __doc__, "verifier", measured)
