"""Every drafter: what it accepts.

python -m specbench.compare experiment=drafters data.limit=16 name=drafters_t0 temperature=0
python -m specbench.compare experiment=drafters data.limit=16 name=drafters_t1 temperature=1
python experiments/drafters/make.py outputs/drafters_t0 outputs/drafters_t1
"""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import ACCEPTED, WITHOUT_TIMES, make, multirun, option, text
from figures import block_efficiency

from specbench.data.sources import SHIPPED

TRAINED = {  # drafter: what was trained for it
    "stdlib_tv": "drafter_tv", "medusa": "medusa", "blockwise": "blockwise",
    "pass_lookahead": "lookahead", "non_autoregressive": "drafter_lookahead", "early_exit": "early_exit",
}  # fmt: skip


def training(result: dict[str, Any]) -> str | None:
    """Tokens and seconds, from the record that came with the checkpoint."""
    name = TRAINED.get(option("drafter")(result))
    if name is None:
        return None
    record = json.loads((SHIPPED / name / "metrics.json").read_text(encoding="utf-8"))["training"]
    return f"{record['tokens'] / 1e6:.1f} M tokens, {record['seconds']:.0f} s"


COLUMNS = {"drafter": option("drafter"), "temperature": "config/temperature", **ACCEPTED, "training": training}
TABLE = {"drafter": text("drafter")} | WITHOUT_TIMES | {"training": text("training")}

if __name__ == "__main__":
    collect = multirun(COLUMNS, lambda row: (row["temperature"], -row["tau"]))
    make(__file__, __doc__, collect, TABLE, lambda rows: block_efficiency(rows, "drafter"))
