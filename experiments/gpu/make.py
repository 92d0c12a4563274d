"""What does a GPU do with the decoder: is it exact, how fast is it, and where does a round go?

    python -m specbench.gpu_check &&
    python experiments/gpu/make.py outputs/gpu_check

Several folders may be given, for checks that were run one by one. Of a check that was stopped, what it had found is
used.
"""

import json
import sys
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import Cell, Measured, Row, Table, commit, machine, make, text

from specbench.errors import ConfigError
from specbench.results.report.style import MEASURED, OTHER

LONGEST = 30  # kernels of a round that are kept, by name
BARS = {  # of the figure: tokens per second of one row
    "plain, executor=eager": "plain, eager", "plain, executor=cudagraph": "plain, graphs",
    "speculative, executor=eager": "speculative, eager", "speculative, executor=cudagraph": "speculative, graphs",
    "generate of transformers": "transformers, generate(), eager",
}  # fmt: skip


def collect(inputs: list[str]) -> Measured:
    """The numbers of all checks in the folders, and the machine that the last of them names."""
    rows, facts = list[Row](), dict[str, Any]()
    for folder in map(Path, inputs):
        for file in sorted(folder.glob("phase_*.jsonl"), key=lambda path: int(path.stem.partition("_")[2])):
            rows += [row(file.stem.partition("_")[2], json.loads(line)) for line in file.read_text().splitlines()]
        if (result := folder / "results.json").is_file():
            facts = json.loads(result.read_text())["facts"]
    if not rows or not facts:
        raise ConfigError("give folders that python -m specbench.gpu_check has written")
    return Measured([found for found in rows if kept(found)], machine(facts, "bfloat16"), commit(facts))


def row(check: str, entry: dict[str, Any]) -> Row:
    limit = "" if entry["limit"] is None else "{} {:g}".format(*entry["limit"])
    value = None if entry["value"] is None else float(f"{entry['value']:.4g}")
    named = {name: entry[name] for name in ("name", "unit", "verdict", "remark")}
    return {"check": check, "value": value, "limit": limit} | named


def kept(found: Row) -> bool:
    """Whether it is no kernel that takes little time."""
    place, dot, _ = found["name"].partition(". ")
    return not (dot and place.isdigit() and int(place) > LONGEST)


def value(found: Row) -> str:
    return f"{found['value']:,.4g} {found.get('unit', '')}".strip() if "value" in found else "-"


def cell(name: str) -> Cell:
    return lambda found: str(found.get(name, "")).replace("|", " ")


TABLE: Table = {"check": text("check"), "number": cell("name"), "value": value, "limit": cell("limit"),
                "verdict": cell("verdict"), "remark": cell("remark")}  # fmt: skip


def figure(rows: list[Row]) -> Figure:
    """Tokens per second of one row by executor, beside transformers."""
    found = {found["name"]: found["value"] for found in rows if found["name"].startswith("tokens/s, ")}
    bars = {shown: rate for name, shown in BARS.items() if (rate := found.get(f"tokens/s, {name}, 1 rows"))}
    drawn, axes = plt.subplots(figsize=(6.4, 2.8), layout="constrained")
    colours = [OTHER if "transformers" in name else MEASURED for name in bars]
    axes.bar_label(axes.barh([*bars], [*bars.values()], color=colours), fmt="%.0f", padding=3, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("tokens/s, one row and text, 3B and 1B shapes")
    return drawn


if __name__ == "__main__":
    make(__file__, __doc__, collect, TABLE, figure)
