"""Tables say what results.json says, and signs in users' strings have no meaning in Markdown, LaTeX and CSV."""

import io
import math
import re

import pandas as pd
import pytest
from records import records
from stored import hostile_records, stored

from specbench.measure.compare import compare
from specbench.report import several, tables
from specbench.report.files import Run


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[Run]:
    folder = tmp_path_factory.mktemp("runs")
    found = []
    for gamma, alpha in ((2, 0.5), (4, 0.8)):
        own = records(gamma=gamma, alpha=alpha, seed=gamma)
        for record in own:
            record.peers = {"transformers": {"tokens": 32, "seconds": 0.4, "text": "", "ids": []}}
        run = stored(folder / str(gamma), own, gamma=gamma, overrides=[f"gamma={gamma}"])
        found.append(Run(run.folder, run.results, f"gamma={gamma}"))
    return found


def first(cell: str) -> float:
    """The number that a cell begins with."""
    return float(re.match(r"-?[\d.,]+", cell)[0].replace(",", ""))


def near(cell: str, value: float) -> bool:
    """Whether a cell is a value rounded to at least two digits."""
    return first(cell) == pytest.approx(value, rel=0.006, abs=0.0051)


def test_the_table_of_runs_has_the_numbers_of_results(runs):
    table = several.runs_table(runs)
    assert list(table["run"]) == ["gamma=2", "gamma=4"]
    for row, run in zip(table.to_dict("records"), runs, strict=True):
        r = run.results
        assert near(row["speedup"], r["speedup"]["measured"]) and near(row["Thm 3.8"], r["speedup"]["theorem_3_8"])
        low, high = map(float, re.search(r"\(([\d.]+) to ([\d.]+)\)", row["speedup"]).groups())
        assert [low, high] == pytest.approx(r["speedup"]["ci95"], abs=0.0051)
        assert near(row["alpha"], r["alpha"]["mean"])
        assert near(row["block efficiency"], r["block_efficiency"]["mean"])
        assert all(near(row[name], r["cost"][name]) for name in "cvo")
        assert near(row["tokens/s"], r["throughput"]["speculative_tokens_per_second"])
        assert near(row["plain tokens/s"], r["throughput"]["baseline_tokens_per_second"])


def test_the_table_of_categories(runs):
    table = tables.by_category(runs)
    expected = [(run.label, category) for run in runs for category in run.results["by_category"]]
    assert len(table) == len(expected) > 2
    for row, (label, category) in zip(table.to_dict("records"), expected, strict=True):
        assert (row["run"], row["category"]) == (label, category["category"])
        assert int(row["prompts"]) == category["prompts"]
        assert near(row["speedup"], category["speedup"]["measured"]) and near(row["alpha"], category["alpha"]["mean"])
        assert near(row["tokens/s"], category["speculative_tokens_per_second"])
    alone = tables.by_category(runs[:1])
    assert "run" not in alone.columns and len(alone) == len(runs[0].results["by_category"])
    nothing = Run(runs[0].folder, runs[0].results | {"by_category": []})
    assert len(tables.by_category([nothing])) == 0


def test_the_table_of_methods(runs):
    results = runs[0].results
    rows = {row["method"]: row for row in tables.methods(runs[0]).to_dict("records")}
    assert set(rows) == {"speculative", "plain", "transformers"}
    for method, name in (("speculative", "speculative"), ("plain", "baseline"), ("transformers", "transformers")):
        assert near(rows[method]["tokens/s"], results["throughput"][f"{name}_tokens_per_second"])
    over = results["speedup_over"]["transformers"]["measured"]
    assert near(rows["transformers"]["speculative over it"], over)
    assert near(rows["plain"]["speculative over it"], results["speedup"]["measured"])
    for head, name in (("first token, ms: p50 / p90", "first_token"), ("per token, ms", "per_token")):
        for method, key in (("speculative", "speculative"), ("plain", "baseline")):
            shown = [float(part) for part in rows[method][head].split(" / ")]
            stored_ms = [1e3 * results["latency"][name][key][p] for p in ("p50", "p90")]
            assert shown == pytest.approx(stored_ms, rel=0.006)
        assert rows["transformers"][head] == "-"


def test_factors_multiply_to_the_speedup(runs):
    speedup = runs[1].results["speedup"]
    product = math.prod(entry["value"] for entry in speedup["accounting"])
    assert product == pytest.approx(speedup["measured"])


def test_the_table_of_a_comparison(runs):
    rows = compare({run.label: run.records for run in runs})
    table = several.comparison(rows)
    assert list(table["method"]) == [row["method"] for row in rows]
    for cells, row in zip(table.to_dict("records"), rows, strict=True):
        assert near(cells["speedup"], row["speedup"]) and near(cells["vs fastest"], row["ratio"])
        assert int(cells["rank"]) == row["rank"]
    assert float(tables.number(1e-9)) == 1e-9 and tables.number(None) == "-" and float(tables.number(0.04)) == 0.04


def test_the_csv_of_a_sweep_has_every_number_as_it_is(runs):
    table = pd.read_csv(io.StringIO(several.sweep_csv(runs).to_csv(index=False)))
    for (_, row), run in zip(table.iterrows(), runs, strict=True):
        r = run.results
        assert row["run"] == run.label and row["alpha/mean"] == pytest.approx(r["alpha"]["mean"], rel=1e-12)
        assert row["speedup/ci95/low"] == pytest.approx(r["speedup"]["ci95"][0], rel=1e-12)
        assert row["cost/ci95/c/high"] == pytest.approx(r["cost"]["ci95"]["c"][1], rel=1e-12)
        assert row["counts/tokens"] == r["counts"]["tokens"]


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "-"), (0.2, "0.200"), (1234.5, "1,234"), (999.6, "1,000"), (99.96, "100"), (0.0, "0.00"), (-3.0, "-3.00")],
)
def test_numbers_keep_their_digits(value, shown):
    assert tables.number(value) == shown


@pytest.mark.parametrize(("expected", "passed", "word"), [
    (True, True, "passed"), (True, False, "failed"), (True, None, "unknown"), (False, None, "lossy by choice"),
    (False, False, "failed"),
])  # fmt: skip
def test_a_verdict_that_is_not_known_is_never_a_pass(expected, passed, word):
    assert tables.verdict({"expected": expected, "passed": passed}) == word


@pytest.fixture(scope="module")
def hostile(tmp_path_factory) -> pd.DataFrame:
    run = stored(tmp_path_factory.mktemp("hostile"), hostile_records())
    return tables.methods(run)


def test_a_name_of_a_user_stays_one_cell_of_markdown(hostile):
    lines = several.written(hostile, "markdown").splitlines()
    assert len(lines) == 2 + len(hostile)
    for line in lines:
        assert len(re.findall(r"(?<!\\)\|", line)) == len(hostile.columns) + 1
        assert "<script" not in line and not re.search(r"(?<!\\)[*`]", line)
        assert "\x1b" not in line and "\u202e" not in line


def test_a_name_of_a_user_has_no_commands_in_latex(hostile):
    lines = [line for line in several.written(hostile, "latex").splitlines() if "alert" in line]
    assert len(lines) == 1
    body = lines[0].removesuffix(r" \\")
    assert not re.search(r"(?<!\\)[$%_&]", body.replace(" & ", "")) and r"\textbf{" not in body
    assert "\x1b" not in body and "\u202e" not in body
