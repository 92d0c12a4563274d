"""What is printed: the answer first, the numbers of results.json, and nothing that commands a terminal."""

import pytest
from stored import HOSTILE, hostile_records, stored

from specbench.measure.compare import compare
from specbench.report import several, tables, terminal
from specbench.report.files import Run


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    return stored(tmp_path_factory.mktemp("one"), notes=["one", "two", "three", "four"])


@pytest.fixture(autouse=True)
def a_wide_terminal(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")


def with_speedup(run: Run, measured, ci95) -> dict:
    return run.results | {"speedup": run.results["speedup"] | {"measured": measured, "ci95": ci95}}


def test_the_summary_begins_with_the_speedup(run, capsys):
    terminal.summary(run.results, run.folder)
    lines = capsys.readouterr().out.splitlines()
    speedup, cost = run.results["speedup"], run.results["cost"]
    assert all(f"{value:.2f}" in lines[0] for value in (speedup["measured"], *speedup["ci95"]))
    text = "\n".join(lines)
    assert f"{speedup['theorem_3_8']:.2f}" in text and f"{run.results['alpha']['mean']:.3f}" in text
    assert all(tables.number(cost[name]) in text for name in "cvo")
    assert tables.verdict(run.results["lossless"]) in text and str(run.folder) in text.replace("\n", "")
    assert 6 <= len(lines) <= 12


def test_the_headline_follows_the_interval(run):
    faster = terminal.headline(with_speedup(run, 1.5, [1.2, 1.8]))
    slower = terminal.headline(with_speedup(run, 0.5, [0.4, 0.6]))
    neither = terminal.headline(with_speedup(run, 1.1, [0.9, 1.3]))
    alone = terminal.headline(with_speedup(run, 1.1, None))
    assert len({faster.split(":")[0], slower.split(":")[0], neither.split(":")[0], alone}) == 4
    assert "1.50" in faster and "0.50" in slower and "0.90 to 1.30" in neither and "1.10" in alone
    assert "None" not in terminal.headline(with_speedup(run, None, None))


def test_a_run_without_drafts_has_a_summary(run, capsys):
    nothing = {"mean": None, "stderr": None, "n": 0}
    cost = {name: None for name in run.results["cost"]} | {"ci95": {}}
    speedup = {name: None for name in run.results["speedup"]} | {"accounting": []}
    terminal.summary(run.results | {"alpha": nothing, "cost": cost, "speedup": speedup}, run.folder)
    assert "None" not in capsys.readouterr().out


def test_one_line_of_a_job_says_if_the_verdict_is_not_good(run):
    lossless = run.results["lossless"]
    good = terminal.one_line(run.results | {"lossless": lossless | {"expected": True, "passed": True}})
    bad = terminal.one_line(run.results | {"lossless": lossless | {"expected": True, "passed": False}})
    assert good in bad and "failed" in bad and "failed" not in good


def test_a_comparison_names_the_fastest_first(run, capsys):
    rows = compare({"fast": run.records, "same": run.records})
    several.answer(several.compared_headline(rows), [run], several.comparison(rows), run.folder)
    out = capsys.readouterr().out
    assert rows[0]["method"] in out.splitlines()[0] and "from it: same" in " ".join(out.split())  # equally fast
    assert "lossless: 1 of 1 " in out and all(f"{row['speedup']:.2f}" in out for row in rows)


def test_nothing_is_claimed_of_a_comparison_without_a_gain(run):
    rows = compare({"fast": run.records, "same": run.records})
    slow = [row | {"speedup": 0.9, "speedup_ci95": [0.8, 1.05]} for row in rows]
    unknown = [row | {"speedup_ci95": None} for row in rows]
    assert all(several.compared_headline(found).startswith("None of 2") for found in (slow, unknown))
    behind = [slow[0], rows[1] | {"speedup": 0.85, "speedup_ci95": [1.01, 1.3]}]
    assert f": {rows[1]['method']}, 0.85x" in several.compared_headline(behind)


@pytest.mark.parametrize("columns", range(76, 141, 4))
def test_any_terminal_shows_names_and_speedups(columns, run, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    label = "gamma=1, temperature=0"
    rows = compare({label: run.records, "other": run.records})
    for frame in (several.runs_table([Run(run.folder, run.results, label)]), several.comparison(rows)):
        terminal.show(terminal.table(frame))
        out = capsys.readouterr().out
        assert label in out and frame["speedup"][0] in out
        assert "…" not in out and max(map(len, out.splitlines())) <= columns


def test_a_users_strings_send_no_commands(tmp_path, capsys):
    run = stored(tmp_path / "run", hostile_records(), notes=[HOSTILE], lossy_reason=HOSTILE, expected_lossless=False)
    terminal.summary(run.results, tmp_path / HOSTILE.replace("/", ""))
    several.answer("1 run", [run], several.runs_table([Run(run.folder, run.results, HOSTILE)]), tmp_path)
    rows = compare({HOSTILE: run.records, "other": run.records})
    several.answer(several.compared_headline(rows), [run], several.comparison(rows), tmp_path)
    out = capsys.readouterr().out
    assert "alert(1)" in out and "\x1b" not in out and "\u202e" not in out
