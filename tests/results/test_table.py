"""`python -m specbench.table`: layouts read back, rows of runs and of pooled runs, and mistakes."""

import csv
import io
import json
import re
import shutil

import numpy as np
import pyarrow
import pyarrow.parquet as parquet
import pytest
from small_runs import call, small

from specbench.results import table_command as table
from specbench.results.category_tables import folds_of
from specbench.results.comparability import short_paths
from specbench.results.table import Column, Table, latex, to_csv, to_latex, to_markdown

COLUMNS = [Column("drafter", digits=None), Column("MAT", "a_b"), Column("speedup", "a_b", unit="x"),
           Column("share", digits=1, unit="%"), Column("95 %", ends=True), Column("none")]  # fmt: skip
ROWS = [["n_gram & co", 2.345, 1.5, 0.25, [1.25, 1.75], None], ["x", -1.0, None, 1.0, None, None]]
SHEET = Table("50 % of it", COLUMNS, ROWS, ["a note"])


def text_of(sheet, width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    table.print_tables([sheet], "text")
    return [line.rstrip() for line in capsys.readouterr().out.splitlines() if line.strip()]


def test_text_drops_empty_columns_and_keeps_digits(monkeypatch, capsys):
    told = text_of(SHEET, 80, monkeypatch, capsys)
    assert told[0] == "50 % of it" and told[-1] == "note: a note" and "none" not in "".join(told)
    assert [line.split() for line in told[1:3]] == [["a_b", "a_b"], ["drafter", "MAT", "speedup", "share", "95", "%"]]
    assert [line.strip() for line in told[-3:-1]] == [
        "n_gram & co   2.35    1.50x   25.0%  1.25-1.75",
        "x            -1.00        -  100.0%          -",
    ]


@pytest.mark.parametrize("width", [30, 34, 40, 60])
def test_columns_that_do_not_fit_follow_below(width, monkeypatch, capsys):
    lines = text_of(SHEET, width, monkeypatch, capsys)
    assert max(map(len, lines)) <= width
    told = "\n".join(lines)
    for number in ("2.35", "1.50x", "25.0%", "1.25-1.75", "-1.00", "100.0%"):
        assert told.count(number) == 1
    assert told.count("n_gram & co") == told.count("drafter") and told.count("MAT") == 1


def test_names_that_would_take_the_page_are_numbers(monkeypatch, capsys):
    sheet = Table("t", [Column("drafter", digits=None), Column("MAT")], [["a" * 50, 1.0], ["b" * 50, 2.0]])
    lines = text_of(sheet, 80, monkeypatch, capsys)
    assert f"1: drafter={'a' * 50}" in lines and max(map(len, lines)) <= 80


def test_csv_has_all_digits_and_columns():
    rows = list(csv.reader(io.StringIO(to_csv(SHEET))))
    assert rows[0] == ["drafter", "a_b MAT", "a_b speedup", "share", "95 % low", "95 % high", "none"]
    assert rows[1:] == [["n_gram & co", "2.345", "1.5", "0.25", "1.25", "1.75", ""],
                        ["x", "-1.0", "", "1.0", "", "", ""]]  # fmt: skip


def test_latex_is_a_tabular_whose_rows_have_as_many_cells():
    lines = to_latex(SHEET).splitlines()
    assert lines[0] == "% 50 % of it" and r"\begin{tabular}{lrrrr}" in lines
    assert [lines.count(rule) for rule in (r"\toprule", r"\midrule", r"\bottomrule")] == [1, 1, 1]
    assert r"\cmidrule(lr){2-3}" in lines and r" & \multicolumn{2}{c}{a\_b} &  &  \\" in lines
    body = lines[lines.index(r"\midrule") + 1 : lines.index(r"\bottomrule")]
    assert body == [
        r"n\_gram \& co & 2.35 & 1.50$\times$ & 25.0\% & 1.25--1.75 \\",
        r"x & $-1.00$ & -- & 100.0\% & -- \\",
    ]
    for line in body:
        assert len(re.findall(r"(?<!\\)&", line)) == 4 and not re.search(r"(?<!\\)[%#_]", line)


def test_names_cannot_break_latex_or_markdown():
    nasty = "\\input{/etc/passwd} $x$ 50% a_b #1 {~^} \x1b[31m <|>"
    told = latex(nasty)
    plain = re.sub(r"\\text\w+\{\}|\\[{}$&#%_]", "", told)
    assert not set(plain) & set("\\{}$&#%_~^<>|\x1b") and "x1b" in told
    row = to_markdown(Table("t", [Column("a", digits=None)], [[nasty]])).splitlines()[-1]
    assert len(re.findall(r"(?<!\\)\|", row)) == 2 and "<" not in row and "\x1b" not in row


def test_markdown_has_as_many_cells_in_each_row():
    lines = [line for line in to_markdown(SHEET).splitlines() if line.startswith("|")]
    assert [len(re.findall(r"(?<!\\)\|", line)) for line in lines] == [6] * 4
    assert lines[2] == "| n\\_gram & co | 2.35 | 1.50x | 25.0% | 1.25-1.75 |"


# Folders: one run, and copies of it whose settings and times are changed.


@pytest.fixture(scope="module")
def one(good, tmp_path_factory):
    """A run of twelve prompts of three categories."""
    home = tmp_path_factory.mktemp("one")
    lines = [{"prompt": f"def f{i}(x):", "category": ("math", "coding", "rag")[i % 3]} for i in range(12)]
    (home / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    options = ["drafter=random", "temperature=0", "executor=eager", "logger=none", "verdict_tokens=0", "gamma=2",
               "target=model", f"target.path={good}", "data=jsonl", f"data.path={home / 'data.jsonl'}",
               "data.category_field=category", "data.limit=12", "max_new_tokens=4"]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        assert call([*small(*options), f"hydra.run.dir={home / 'run'}"], patch, home) == 0
    return home / "run"


def copy(one, to, slower=1.0, drop=(), **settings):
    """A copy with other settings, whose speculative seconds are `slower` times as long, without some fields."""
    shutil.copytree(one, to)
    result = json.loads((to / "results.json").read_text())
    for key, value in settings.items():
        if key in result["choices"]:
            result["choices"][key] = value
            result["config"][key] = {"_target_": value}
        else:
            result["config"][key] = value
    result["overrides"] = [f"{key}={value}" for key, value in settings.items()]
    for name in drop:
        del result[name]
    (to / "results.json").write_text(json.dumps(result))
    sums = parquet.read_table(to / "sums.parquet")
    columns = {name: sums[name].to_numpy() for name in sums.column_names}
    columns |= {"seconds": columns["seconds"] * slower, "log_speedup": columns["log_speedup"] - np.log(slower)}
    parquet.write_table(pyarrow.table(columns, schema=sums.schema), to / "sums.parquet")
    return to


def rows_of(capsys, *arguments):
    """The rows of a table as CSV."""
    table.main([*map(str, arguments), "--format", "csv"])
    return list(csv.DictReader(io.StringIO(capsys.readouterr().out)))


def test_a_run_has_all_tables_at_80_columns(one, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    table.main([str(one)])
    told = capsys.readouterr().out
    assert max(map(len, told.splitlines())) <= 80
    for title in ("speedup over plain decoding", "acceptance by place", "rounds by accepted", "kind of the guess",
                  "acceptance by entropy", "calibration of the drafter", "times between tokens"):  # fmt: skip
        assert title in told


def test_the_rows_are_those_of_results_json(one, capsys):
    result = json.loads((one / "results.json").read_text())
    rows = rows_of(capsys, one)
    assert [row["category"] for row in rows] == ["coding", "math", "rag", "overall"]
    for row in rows[:-1]:
        own = result["by_category"][row["category"]]
        numbers = (own["speedup"]["measured"], own["block_efficiency"]["mean"])
        assert (float(row["speedup"]), float(row["block efficiency"])) == numbers
    assert float(rows[-1]["speedup"]) == result["speedup"]["measured"] and int(rows[-1]["requests"]) == 12
    assert float(rows[-1]["95 % low"]) == result["speedup"]["ci95"][0]
    lengths = rows_of(capsys, one, "--show", "lengths")
    assert [int(row["rounds"]) for row in lengths] == result["acceptance"]["lengths"]


def test_rows_are_named_by_what_differs_and_one_is_one_however_it_is_written(one, tmp_path, capsys):
    for drafter, temperature in (("random", 0), ("random", 1), ("ngram", 0), ("ngram", 1.0)):
        copy(one, tmp_path / f"{drafter}{temperature}", drafter=drafter, temperature=temperature)
    names = [("ngram", "0"), ("ngram", "1"), ("random", "0"), ("random", "1")]
    for by in ("run", "drafter,temperature"):
        rows = rows_of(capsys, tmp_path, "--by", by)
        assert [(row["drafter"], row["temperature"]) for row in rows] == names
        assert {"math block efficiency", "math speedup", "overall 95 % low", "overall tokens/s"} < set(rows[0])
    turned = rows_of(capsys, tmp_path, "--by", "category")
    assert [row["category"] for row in turned] == ["coding", "math", "rag", "overall"] and len(turned[0]) == 9


def test_runs_of_one_row_are_pooled_and_only_if_they_did_the_same(one, tmp_path, capsys):
    slower = (1.0, 1.5, 2.0)
    for seed, factor in enumerate(slower):
        copy(one, tmp_path / f"s{seed}", factor, seed=seed)
    single = float(rows_of(capsys, one)[-1]["speedup"])
    (row,) = rows_of(capsys, tmp_path, "--by", "drafter")
    assert row["drafter"] == "random" and float(row["overall speedup"]) == pytest.approx(single / np.mean(slower))
    assert row["overall 95 % low"]  # of three processes
    (row,) = rows_of(capsys, tmp_path, "--by", "drafter", "--speedup", "geometric_mean")
    mean = json.loads((one / "results.json").read_text())["speedup"]["geometric_mean"]["mean"]
    assert float(row["overall speedup"]) == pytest.approx(mean / np.exp(np.log(slower).mean()))


@pytest.mark.parametrize(
    "settings, key",
    [({"temperature": 1}, "temperature"), ({"target": "llama3b"}, "target"), ({"data": "questions"}, "data"),
     ({"gamma": 5}, "gamma")],
)  # fmt: skip
def test_a_row_does_not_mix(settings, key, one, tmp_path, capsys):
    copy(one, tmp_path / "a")
    copy(one, tmp_path / "b", **settings)
    with pytest.raises(SystemExit) as stop:
        table.main([str(tmp_path), "--by", "drafter"])
    told = " ".join(capsys.readouterr().err.split())
    assert stop.value.code == 2
    assert f"the row random would mix runs that differ in {key}: add {key} to --by, or leave folders out" in told
    assert len(rows_of(capsys, tmp_path, "--by", f"drafter,{key}")) == 2


@pytest.mark.parametrize("temperature", [0, 1])
def test_runs_side_by_side_that_did_other_work_have_a_note(temperature, one, tmp_path, capsys):
    folders = [copy(one, tmp_path / name, drafter=name) for name in ("random", "ngram")]
    result = json.loads((folders[1] / "results.json").read_text())
    result["config"]["temperature"] = temperature  # 0 is the other's
    (folders[1] / "results.json").write_text(json.dumps(result))
    table.main([*map(str, folders)])
    told = "the runs differ in temperature: they did not do the same work"
    assert (told in capsys.readouterr().out) == bool(temperature)


def test_folded_categories_are_one(one, tmp_path, capsys):
    columns = parquet.read_table(one / "sums.parquet").to_pydict()
    own = [i for i, name in enumerate(columns["category"]) if name != "rag"]
    total = {name: sum(columns[name][i] for i in own)
             for name in ("tokens", "seconds", "plain_tokens", "plain_seconds", "rounds")}  # fmt: skip
    rows = {row["category"]: row for row in rows_of(capsys, one, "--fold", "spec_bench")}
    assert set(rows) == {"mt_bench", "rag", "overall"} and int(rows["mt_bench"]["requests"]) == 8
    measured = total["plain_seconds"] / total["plain_tokens"] / (total["seconds"] / total["tokens"])
    assert float(rows["mt_bench"]["speedup"]) == pytest.approx(measured)
    assert float(rows["mt_bench"]["block efficiency"]) == pytest.approx(total["tokens"] / total["rounds"])
    assert rows["mt_bench"]["95 % low"]  # of eight prompts; four are too few
    assert folds_of(["both=math,coding"]) == {"both": ["math", "coding"]}
    assert (
        rows_of(capsys, one, "--fold", "both=math,coding")[0]["block efficiency"]
        == rows["mt_bench"]["block efficiency"]
    )


def test_a_run_without_some_numbers_shows_what_it_has(one, tmp_path, capsys):
    old = copy(one, tmp_path / "old", drop=("by_category", "acceptance", "throughput_by_rows"))
    result = json.loads((old / "results.json").read_text()) | {"latency": {}}
    del result["speedup"]["geometric_mean"]
    (old / "results.json").write_text(json.dumps(result))
    table.main([str(old)])
    told = capsys.readouterr().out
    assert "overall" in told and "math" not in told and "acceptance by" not in told and "geo" not in told


def test_a_part_that_differs_in_one_setting_is_told_by_it(one, tmp_path, capsys):
    """Not `drafter`, which tells nothing apart; and with that setting there are two rows, named by the last folders."""
    for path in ("/a/b/small", "/a/c/small"):
        folder = copy(one, tmp_path / path.replace("/", "-"))
        result = json.loads((folder / "results.json").read_text())
        result["config"]["drafter"]["path"] = path
        (folder / "results.json").write_text(json.dumps(result))
    with pytest.raises(SystemExit):
        table.main([str(tmp_path), "--by", "drafter"])
    told = " ".join(capsys.readouterr().err.split())
    assert "runs that differ in drafter.path: add drafter.path to --by, or leave folders out" in told
    rows = rows_of(capsys, tmp_path, "--by", "drafter,drafter.path")
    assert [row["drafter.path"] for row in rows] == ["b/small", "c/small"]
    assert short_paths(["/a/b/q", "org/r", "shipped:x", "-"]) == {"/a/b/q": "q", "org/r": "r"}
    assert short_paths(["/q", "q"]) == {}  # only the whole path tells it from the other


def test_chosen_columns_have_their_errors(one, tmp_path, capsys):
    result = json.loads((one / "results.json").read_text())
    (row,) = rows_of(capsys, one, "--columns", "MAT,alpha,speedup,c,lossless")
    estimate, alpha = result["block_efficiency"], result["alpha"]
    assert [float(row[name]) for name in ("block efficiency", "alpha")] == [estimate["mean"], alpha["mean"]]
    assert [*row][:5] == ["run", "block efficiency", "block efficiency +-", "alpha", "alpha +-"]
    assert float(row["alpha +-"]) == alpha["stderr"]
    assert float(row["c 95 % low"]) == result["cost"]["ci95"]["c"][0] and row["lossless"] == "untested"
    table.main([str(one), "--columns", "alpha,tau", "--format", "markdown"])
    told = capsys.readouterr().out
    assert "block efficiency: tokens per target call (tau, MAT)" in told and f"| {alpha['mean']:.3f} |" in told
    for seed in range(2):
        copy(one, tmp_path / f"s{seed}", seed=seed)
    (row,) = rows_of(capsys, tmp_path, "--by", "drafter", "--columns", "tau,tokens/s,tokens")
    assert float(row["tokens"]) == 2 * result["counts"]["tokens"]


def test_values_of_a_setting_across_and_p_of_each_group(one, tmp_path, capsys):
    """Where nothing differs p is 1, where one is twice as slow in every prompt p is below a thousandth."""
    for drafter, slower in (("bigram", 1.0), ("ngram", 1.0), ("random", 2.0)):
        for temperature in (0, 1):
            copy(one, tmp_path / f"{drafter}{temperature}", slower, drafter=drafter, temperature=temperature)
    asked = [tmp_path, "--columns", "tau,speedup,p", "--across", "temperature"]
    rows = rows_of(capsys, *asked)
    assert [row["drafter"] for row in rows] == ["bigram", "ngram", "random"]
    for group in ("temperature 0", "temperature 1"):
        p = [row[f"{group} p"] for row in rows]
        assert p[0] == "" and float(p[1]) == 1 and float(p[2]) < 0.001
        assert (
            float(rows[0][f"{group} speedup"]) == json.loads((one / "results.json").read_text())["speedup"]["measured"]
        )
    table.main([*map(str, asked), "--format", "latex"])
    told = capsys.readouterr().out
    assert r"\multicolumn{5}{c}{temperature 0} & \multicolumn{5}{c}{temperature 1}" in told
    assert told.count(r"\textless{}.001") == 2 and "no difference from drafter bigram, temperature 1 in speedup" in told
    assert "corrected by Holm's method for all 3 pairs of rows" in told
    other_work = "the runs differ in temperature: they did not do the same work"
    assert other_work not in told
    table.main([str(tmp_path), "--columns", "p"])
    assert other_work in " ".join(capsys.readouterr().out.split())
    (row,) = rows_of(capsys, tmp_path / "ngram0", tmp_path / "ngram1", "--across", "temperature")
    assert row["drafter"] == "ngram" and "temperature 1 alpha" in row


@pytest.mark.parametrize(("arguments", "sentence"), [
    (["{one}", "--columns", "speedp"], "speedp is not a column. Did you mean speedup?"),
    (["{one}", "--columns", "tau", "--by", "category"], "--columns and --across are not possible with --by category"),
    (["{one}", "--across", "gama"], "--by gama is not possible"),
    (["nowhere"], "nowhere is no folder"),
    (["{one}", "--show", "speed"], "--show speed is not allowed: it must be all, or some of speedup"),
    (["{one}", "--by", "gama"], "--by gama is not possible"),
    (["{one}", "--by", "provenance"], "--by provenance is not possible"),
    (["{one}", "--show", "all", "--format", "csv"], "--format csv has one table"),
    (["{one}", "--fold", "mine"], "--fold mine is not allowed: it must be NAME=A,B, or spec_bench"),
    (["{one}", "--fold", "=a"], "--fold =a is not allowed"),
    (["{one}", "--fold", "x=y,z"], "--fold x has no effect"),
])  # fmt: skip
def test_mistakes_are_one_sentence(arguments, sentence, one, capsys):
    with pytest.raises(SystemExit) as stop:
        table.main([word.format(one=one) for word in arguments])
    told = " ".join(capsys.readouterr().err.split())
    assert stop.value.code == 2 and sentence in told and told.count("specbench:") == 1
