"""Tables at 80 and 60 columns: a column is there or not, and no cell, number or word of what is there is cut."""

import re

import pytest
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from specbench.contrib.planning import table as plan
from specbench.contrib.planning.plans import Plan
from specbench.contrib.replay import table as replay
from specbench.results.comparison_tables import tables
from specbench.results.fields import SUMMARY
from specbench.results.latency_table import load_table
from specbench.results.run_table import Remarked, _remarks, _whole
from specbench.results.sweep_table import OVER, multirun_tables
from specbench.results.table import Table
from specbench.results.terminal import broken, show
from specbench.stats.comparison import Compared, Comparison, Pair
from specbench.stats.replay import Replayed, Trace

KEYS = ("temperature", "gamma_policy.largest", "repetition_penalty")


@pytest.fixture(params=(80, 60))
def width(request):
    return request.param


def rendered(width, *renderables):
    console = Console(width=width, markup=False, emoji=False)
    with console.capture() as capture:
        console.print(*renderables)
    return capture.get()


def whole(text, width, cells):
    """Whether every one of the cells stands somewhere uncut; no line may be too long, or have an ellipsis."""
    assert "…" not in text and max(map(len, text.splitlines())) <= width
    return all(re.search(rf"(?<![\w.]){re.escape(cell)}(?![\w.])", text) for cell in cells)


def jobs(peers=()):
    """Rows of three jobs, and of one without a result."""
    known = [{**{key: f"0.{n}5" for key in KEYS}, **{heading: 0.123456 + n for heading in SUMMARY}, "low": 0.987 + n,
              "high": 10.25 + n, "processes": None, "sd": None, "lossless": "yes",
              **{f"{OVER}{peer}": 1.5 for peer in peers}} for n in range(3)]  # fmt: skip
    return [*known, {key: "0.95" for key in KEYS} | {"lossless": "no result"}]


@pytest.mark.parametrize("peers", [(), ("assisted", "prompt_lookup")])
def test_the_table_of_a_sweep(width, peers):
    found = rendered(width, *multirun_tables(jobs(peers), "4 jobs, written to x", "summary.csv"))
    listed = re.findall(r"not shown, in summary.csv: ([^\n]*(?:\n[^\n]+)*)", found)
    left_out = [name for text in listed for name in " ".join(text.split()).split(", ")]
    assert left_out and set(left_out) <= {*SUMMARY, *(f"{OVER}{peer}" for peer in peers)} and "lossless" not in left_out
    assert whole(found, width, ["0.05", "0.15", "0.25", "0.95", "0.12", "1.12", "0.99-10.25", "2.99-12.25", "yes"])
    assert "tempera" not in found.replace("temperature", "") and "no result" in found


def test_a_table_that_cuts_is_found():
    """The negative control: a table of Rich's own, which cuts what does not fit."""
    rows, table = jobs(), Grid()
    for heading in rows[0]:
        table.add_column(heading, no_wrap=True)
    for row in rows:
        table.add_row(*(str(row.get(heading)) for heading in rows[0]))
    found = rendered(80, table)
    with pytest.raises(AssertionError):
        whole(found, 80, ["0.05"])
    assert not whole(found.replace("…", ""), 80, ["temperature"])


def test_columns_continue_in_further_tables_and_long_names_are_numbered(width):
    rows = [{"drafter.path": "/a/very/long/" + "folder/" * 12 + str(n), "k": "v"} for n in range(3)]
    rows = [row | {f"number {c}": f"{n}.{c}0125" for c in range(15)} for n, row in enumerate(rows)]
    found = rendered(width, Table.of(rows, "a title", ["drafter.path", "k"]))
    assert whole(found, width, [cell for row in rows for name, cell in row.items() if name.startswith("number")])
    joined = found.replace("\n", "")
    assert all(f"{n}: drafter.path={row['drafter.path']}, k=v" in joined for n, row in enumerate(rows, 1))
    assert found.count("#") >= 2  # in each table


def test_headings_are_broken_at_their_joints():
    assert broken("gamma_policy.largest") == "gamma_\npolicy.\nlargest"
    assert broken("temperature") == "temperature" and broken("plain tokens/s") == "plain\ntokens/s"


def test_the_rows_of_a_run(width):
    rows = [("alpha (accepted / tested)", "0.623 +- 0.012", "over 12,345 tested guesses with executor=compiled"),
            ("c", "0.123", "0.101 to 0.145; drafter step / target step of 12.34 ms")]  # fmt: skip
    found = rendered(width, Remarked("measured", [rows, rows]))
    assert whole(found, width, ["0.623 +- 0.012", "0.123", *(word for row in rows for word in row[2].split())])


def compared(count):
    runs = [Compared(f"way {n}", n + 1, dict.fromkeys(("tokens_per_second", "speedup", "alpha", "alpha_on_target_text",
                                                       "tau", "c", "v", "o"), 123.4567 + n), {"speedup": (1.0, 1.1)},
                     0.812345, (0.7912, 0.8333), 0.0123, None, None, {"alpha": 0.91, "c": 1.23, "v": 0.77, "o": 1.5,
                     "gamma": 0.5, "plain": 1.25} if n else {}, {}) for n in range(count)]  # fmt: skip
    return Comparison("tokens_per_second", 32, 32, "way 0", runs, [Pair("way 0", "way 1", 0.8, None, 0.01, 0.02)])


def test_a_ranking(width):
    names = {f"way {n}": {"drafter": "non_autoregressive", "temperature": f"0.{n}"} for n in range(3)}
    found = rendered(width, *tables(compared(3), names, ""))
    expected = ["0.0", "0.2", "123.5", "125.5", "0.812", "0.791-0.833", ".012", "123.46", "125.457", "x0.91", "x1.23"]
    assert whole(found, width, [*expected, "x0.77", "x1.50", "x0.50", "x1.25"])


def test_a_plan_a_replay_and_waiting_times(width):
    plans = [Plan(1, 4000, 512, 0.01234, 3600.0), Plan(5, 800, 64, 0.015, 360.0)]
    found = rendered(width, plan.plan_table(plans, "+- 2 % of the speedup", 100))
    assert whole(found, width, ["1 (this process alone)", "4000", "1.23", "60 min", "6 min"])

    every = {name: Replayed(1.23456, (1.111, 1.333), 100.0, 400.0, 250) for name in ("gamma 4", replay.BEST, "oracle")}
    found = rendered(width, replay.replay_table(Trace([], [], 1.2), every))
    assert whole(found, width, ["best gamma", "1.235x", "1.11 to 1.33", "2.50", "4.00"])

    waits = {f"p{p}": p / 7 for p in (50, 90, 99)}
    latency = {delay: waits for delay in ("queue", "first_token", "per_token")}
    served = {"latency": latency, "goodput": {"share": 0.931, "tokens_per_second": 123.4, "ci95": {
        "share": [0.9, 0.95], "tokens_per_second": [100.0, 150.0]}}}  # fmt: skip
    entry = {"rate": 12.5, "requests": 6000, "decoders": {"speculative": served, "baseline": served}}
    found = rendered(width, load_table({"latency_by_rate": [entry]}))
    assert whole(found, width, ["7.143 / 12.857 / 14.143", "speculative, 12.5/s", "6000", "93% (90% to 95%)"])


def test_a_file_gets_as_many_columns_as_asked_for(monkeypatch, capsys):
    def widest(columns):
        monkeypatch.setenv("COLUMNS", columns) if columns else monkeypatch.delenv("COLUMNS", raising=False)
        show(*multirun_tables(jobs(), "", "summary.csv"))
        return max(map(len, capsys.readouterr().out.splitlines()))

    assert widest("60") <= 60 < widest("")


def test_a_line_to_copy_is_never_broken(monkeypatch, capsys, tmp_path):
    folder = tmp_path / ("a" * 90) / "drafter.path=x"
    (folder / "wandb" / "offline-run-1-b").mkdir(parents=True)
    result = {"counts": {"prompts": 8, "tokens": 9, "too_long": 0, "failed": 0, "drafted": 0}, "status": "complete",
              "speedup": {"accounting": {}, "ci95": None, "clusters": 8}, "notes": [], "repeats": None,
              "lossless": {"verdict": "untested", "reason": "", "method": "", "detail": {}, "decoder_tv": None,
                           "alpha_own": {"passed": None, "reason": ""},
                           "detectable": {"lenience": None, "by_kind": {}}}}  # fmt: skip
    monkeypatch.setenv("COLUMNS", "60")
    show(*_remarks(result, folder))
    lines = capsys.readouterr().out.splitlines()
    assert str(folder) in lines and f"wandb sync {folder}/wandb/offline-run-1-b" in lines
    (folder / "wandb" / "offline-run-1-b").rmdir()
    show(*_remarks(result, folder), Text("a" * 90))
    printed = capsys.readouterr().out
    assert "wandb" not in printed and "a" * 60 + "\n" in printed  # any other text is wrapped
    show(_whole("python -m specbench " + "x" * 90))
    assert capsys.readouterr().out == "python -m specbench " + "x" * 90 + "\n"
