"""`python -m specbench.report FOLDER`: pages and tables of finished runs, sweeps and comparisons."""

import io
import json

import pandas as pd
import pytest
from records import records
from stored import put, stored

from specbench.measure.compare import compare
from specbench.report import files, several, tables
from specbench.report.__main__ import main


@pytest.fixture
def sweep(tmp_path):
    for gamma in (2, 4):
        own = records(4, gamma=gamma, seed=gamma)
        stored(tmp_path / str(gamma), own, gamma=gamma, overrides=[f"gamma={gamma}"])
    return tmp_path


def refused(words, capsys) -> str:
    """The sentence of a command that ends with code 2."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    return line


def test_the_page_of_a_run_is_made_again(sweep, capsys):
    page = sweep / "2" / files.PAGE
    before = page.read_text()
    page.unlink()
    main([str(sweep / "2")])
    assert page.read_text() == before and str(page) in capsys.readouterr().out


def test_the_page_and_the_ranking_of_a_comparison(sweep, capsys):
    runs = files.read_all(sweep)
    rows = compare({run.label: run.records for run in runs})
    content = {"schema_version": 3, "kind": "comparison", "rows": rows}
    (sweep / files.COMPARISON).write_text(json.dumps(content))
    main([str(sweep)])
    assert "Ranking" in (sweep / files.PAGE).read_text()
    main([str(sweep), "--format", "markdown"])
    assert several.written(several.comparison(rows), "markdown") in capsys.readouterr().out


def test_formats_print_the_same_tables(sweep, capsys):
    runs = files.read_all(sweep)
    for form in ("markdown", "latex"):
        main([str(sweep), "--format", form])
        out = capsys.readouterr().out
        assert several.written(several.runs_table(runs), form) in out
        assert several.written(tables.by_category(runs), form) in out
    main([str(sweep), "--format", "csv"])
    found = pd.read_csv(io.StringIO(capsys.readouterr().out))
    assert list(found["speedup/measured"]) == pytest.approx([run.results["speedup"]["measured"] for run in runs])
    assert {"gamma", "drafter", "temperature"} <= {*found.columns}
    assert not (sweep / files.PAGE).exists()


def test_a_folder_that_is_none(tmp_path, capsys):
    assert "is no folder" in refused([str(tmp_path / "nowhere")], capsys)


def test_a_folder_without_a_finished_run(tmp_path, capsys):
    put(tmp_path, records(1))
    for form in ("html", "csv"):
        assert files.RESULTS in refused([str(tmp_path), "--format", form], capsys)


def test_a_dashboard_without_a_project(sweep, capsys):
    main([str(sweep), "--format", "csv"])
    capsys.readouterr()
    assert "ENTITY/PROJECT" in refused([str(sweep), "--format", "html", "--wandb", "x"], capsys)
