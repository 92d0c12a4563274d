"""sums.parquet: sums over each request agree with the other files of a run, and bad files are a sentence."""

import json
import math
import shutil

import numpy as np
import pyarrow
import pyarrow.parquet as parquet
import pytest
from choosing import only
from small_runs import parts_of

from specbench.errors import ConfigError
from specbench.results.parquet import FILE, load_sums
from specbench.results.writer import write_result
from specbench.run.run import run
from specbench.stats.bootstrap import BootstrapSums
from specbench.stats.formulas import speedup_of
from specbench.stats.request_sums import request_sums


@pytest.fixture(scope="module", params=only([2], [1, 2]))
def made(request, tmp_path_factory):
    """A run's folder and its record."""
    batch, folder = f"batch_size={request.param}", tmp_path_factory.mktemp("run")
    parts = parts_of("executor=eager", "data.limit=6", "gamma=2", "drafter=random", batch)
    result, record = run(parts, folder)
    write_result(result, record, "digest", folder, parts.target.tokenizer)
    return folder, record


@pytest.fixture
def folder(made):
    return made[0]


def test_sums_agree_with_the_other_files(folder):
    result = json.loads((folder / "results.json").read_text())
    prompts = {line["id"]: line for line in map(json.loads, (folder / "prompts.jsonl").read_text().splitlines())}
    rounds = parquet.read_table(folder / "rounds.parquet").to_pylist()
    positions = parquet.read_table(folder / "positions.parquet").to_pylist()
    found = load_sums(folder)
    columns, batch = found.columns, result["config"]["batch_size"]
    assert found.requests == found.prompts == list(prompts)
    assert len(set(found.clusters)) == {1: 6, 2: 1}[batch]  # one group of rows
    for row, name in enumerate(found.requests):
        line, own = prompts[name], [r for r in rounds if r["prompt"] == name]
        for column, expected in (
            ("seconds", line["decode_seconds"]),
            ("plain_seconds", line["baseline_decode_seconds"]),
            ("prefill_seconds", line["prefill_seconds"]),
            ("plain_prefill_seconds", line["baseline_prefill_seconds"]),
            ("tokens", line["tokens"]),
            ("beta", sum(sum(r["beta"]) for r in own)),
            ("tested", sum(r["tested"] for r in own)),
            ("drafts of 2", sum(r["gamma"] == 2 for r in own)),
            ("beta at 1", sum(r["beta"][1] for r in own if len(r["beta"]) > 1)),
            ("verify_seconds", sum(r["verify_seconds"] / r["rows"] for r in own)),
            ("drift_tested", sum(p["outcome"] is not None for p in positions if p["prompt"] == name)),
        ):
            assert columns[column][row] == pytest.approx(expected), column
    sums = BootstrapSums(columns, found.clusters)
    assert float(speedup_of(sums.point)) == pytest.approx(result["speedup"]["measured"])
    for name in ("accepted", "recovered", "bonus", "accepted_before_stop", "verified", "rounds", "drafted"):
        assert columns[name].sum() == result["counts"][name]
    s = sums.point
    assert s["text_beta"] / s["text_tested"] == pytest.approx(result["alpha_on_target_text"]["mean"])
    assert s["drift_tv"] / s["drift_tested"] == pytest.approx(result["drift"]["tv"], abs=1e-12)
    rate = s["plain_bytes"] / s["plain_step_seconds"]
    assert rate == pytest.approx(result["bandwidth"]["target_bytes_per_second"])
    ours, plain = ((s[f"{way}seconds"] + s[f"{way}prefill_seconds"]) / s[f"{way}tokens"] for way in ("", "plain_"))
    assert plain / ours == pytest.approx(result["speedup"]["end_to_end"])


def test_more_numbers_have_an_interval_if_there_are_enough_clusters(folder):
    result = json.loads((folder / "results.json").read_text())
    bandwidth, drift, speedup = (result[name] for name in ("bandwidth", "drift", "speedup"))
    read = bandwidth["target_bytes_per_second"], bandwidth["ci95"]["target_bytes_per_second"]
    found = (read, (drift["tv"], drift["ci95"]["tv"]), (speedup["end_to_end"], speedup["end_to_end_ci95"]))
    assert set(drift["ci95"]) == {"tv", "kl"}
    if result["config"]["batch_size"] == 2:  # one group of rows
        assert {ci95 for _, ci95 in found} == {None}
        return
    assert all(low <= value <= high for value, (low, high) in found)
    columns = load_sums(folder).columns  # the linearised error of a ratio of sums
    rest = columns["plain_bytes"] - read[0] * columns["plain_step_seconds"]
    error = math.sqrt(6 / 5 * (rest**2).sum()) / columns["plain_bytes"].sum()
    assert math.log(read[1][1] / read[1][0]) / 2 == pytest.approx(2.571 * error, rel=0.15)


NUMBERS = "its column x is not of numbers alone"
BAD = {  # from a table and the bytes of its file to another table, or other bytes
    "none": (lambda table, whole: None, "cannot be read"),
    "cut short": (lambda table, whole: whole[:100], "cannot be read"),
    "no rows": (lambda table, whole: table[:0], "has no rows"),
    "a column too few": (lambda table, whole: table.drop_columns(["beta"]), "no column beta"),
    "text": (lambda table, whole: table.append_column("x", pyarrow.array(["1"] * 6)), NUMBERS),
    "an empty cell": (lambda table, whole: table.append_column("x", pyarrow.array([None] + [1.0] * 5)), NUMBERS),
}


@pytest.mark.parametrize("what", BAD)
def test_sums_that_cannot_be_used_are_a_sentence(what, folder, tmp_path):
    path, (broken, expected) = tmp_path / FILE, BAD[what]
    shutil.copy(folder / FILE, path)
    assert load_sums(tmp_path).requests  # negative control
    found = broken(parquet.read_table(path), path.read_bytes())
    path.unlink()
    if isinstance(found, bytes):
        path.write_bytes(found)
    elif found is not None:
        parquet.write_table(found, path)
    with pytest.raises(ConfigError, match=expected):
        load_sums(tmp_path)


def test_columns_that_only_some_requests_have_are_filled_with_zeros(made):
    folder, record = made
    whole, batch = record.sums.columns, json.loads((folder / "results.json").read_text())["config"]["batch_size"]
    again = request_sums(record, batch, True, lambda calls, columns: calls + columns).columns
    assert {"drafts of 1", "beta at 1"} < set(again) <= set(whole)
    assert any((column == 0).any() and (column > 0).any() for column in again.values())
    for name in set(again) - {"plain_bytes"}:
        assert np.array_equal(whole[name], again[name]), name
