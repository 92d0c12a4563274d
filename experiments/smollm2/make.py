"""SmolLM2-135M-Instruct on Spec-Bench: every drafter, at both temperatures, by category.

python -m specbench.compare experiment=smollm2 data=spec_bench data.path=question.jsonl name=smollm2_t0 temperature=0
python -m specbench.compare experiment=smollm2 data=spec_bench data.path=question.jsonl name=smollm2_t1 temperature=1
python experiments/smollm2/make.py outputs/smollm2_t0 outputs/smollm2_t1
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import ACCEPTED, OF_TIMES, TIMES, WITHOUT_TIMES, Columns, Measured, Row, make, measured, option, text
from figures import by_temperature, speedups
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specbench.results.fields import at
from specbench.results.reader import StoredRun, load_runs

ALL = "all"  # questions
COLUMNS: Columns = {"temperature": "config/temperature", "drafter": option("drafter"), **ACCEPTED, **TIMES}
OF_CATEGORY = {
    "prompts": "prompts",
    "alpha": "alpha/mean",
    "alpha_stderr": "alpha/stderr",
    "tau": "block_efficiency/mean",
    "tau_stderr": "block_efficiency/stderr",
    "speedup": "speedup/measured",
    "low": "speedup/ci95/0",
    "high": "speedup/ci95/1",
    "tokens_per_second": "tokens_per_second",
    "plain_tokens_per_second": "baseline_tokens_per_second",
}
TABLE = {"category": text("category"), "drafter": text("drafter"), "questions": text("prompts"), **WITHOUT_TIMES,
         **OF_TIMES}  # fmt: skip


def collect(inputs: list[str]) -> Measured:
    """A row for each temperature, drafter and category, those of all questions first."""
    runs = load_runs(*map(Path, inputs))
    rows = [row for run in runs for row in rows_of(run)]
    rows.sort(key=lambda row: (row["temperature"], row["category"] != ALL, row["category"], -(row["speedup"] or 0)))
    return measured(rows, [run.result for run in runs])


def rows_of(run: StoredRun) -> Iterator[Row]:
    """A row of all questions, then one of each category, of which a run stores fewer numbers."""
    found = {name: at(run.result, of) if isinstance(of, str) else of(run.result) for name, of in COLUMNS.items()}
    yield {"category": ALL, "prompts": run.result["counts"]["prompts"], **found}
    for category, numbers in (run.result["by_category"] or {}).items():
        own = {name: at(numbers, path) for name, path in OF_CATEGORY.items()}
        yield {"category": category, "temperature": found["temperature"], "drafter": found["drafter"], **own}


def draw(rows: Sequence[Row]) -> Figure:
    """The speedup of each drafter over all questions, with its interval."""

    def panel(axes: Axes, here: list[Row]) -> None:
        speedups(axes, here, [row["drafter"] for row in here], "speedup over plain decoding, all questions")

    whole = [row for row in rows if row["category"] == ALL]
    return by_temperature(whole, panel, (5.6, 1.2 + 0.26 * len({row["drafter"] for row in whole})))


if __name__ == "__main__":
    make(__file__, __doc__, collect, TABLE, draw)
