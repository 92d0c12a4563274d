"""Runs in folders, made of synthetic records, for tests of what is written and read of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from records import facts, records

from specbench.measure.record import Record, append
from specbench.measure.results import results
from specbench.report import files, page
from specbench.report.files import Run

# Signs with a meaning in HTML, in terminals, in Markdown, in LaTeX, in matplotlib's formulas and in reading order.
HOSTILE = "</pre><script>alert(1)</script>|&_%$x^2$\\textbf{y}\x1b[31m`z`\u202e\n*w*"


def put(folder: Path, own: Sequence[Record]) -> Path:
    """Writes prompts.jsonl into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / files.RECORDS).open("w", encoding="utf-8") as file:
        for record in own:
            append(file, record)
    return folder


def stored(folder: Path, own: Sequence[Record] | None = None, **changes: Any) -> Run:
    """A finished run in a folder, of eight synthetic prompts if no records are given; `changes` are of its facts."""
    own = records() if own is None else own
    put(folder, own)
    return page.write_run(folder, results(own, facts(**changes)), own)


def hostile_records() -> list[Record]:
    """Records whose strings come from outside."""
    own = records(4, tokens=8)
    for record in own:
        record.id += HOSTILE
        record.category = HOSTILE
        record.prompt = HOSTILE
        assert record.speculative is not None
        record.speculative.text = HOSTILE
        record.peers = {HOSTILE: {"tokens": 8, "seconds": 0.5, "text": HOSTILE, "ids": [1]}}
    return own
