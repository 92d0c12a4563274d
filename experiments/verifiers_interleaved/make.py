"""Which verifier is faster: each on every prompt in turn, in one process. Overrides may follow the command.

python experiments/verifiers_interleaved/make.py
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import make
from figures import measured
from interleaved import compare, table

if __name__ == "__main__":
    make(__file__, __doc__, compare("verifier"), table("verifier"), lambda rows: measured(rows, "verifier"))
