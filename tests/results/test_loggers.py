"""The loggers: what W&B's own file holds of a run, of one that is cut short, and of a sweep."""

import json
import logging
import shutil
import struct
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import wandb
from small_runs import call, composed, interrupt_the_second_group, parts_of, small
from wandb.proto.wandb_internal_pb2 import Record as WandbRecord

from specbench.config.validate import check
from specbench.errors import ConfigError
from specbench.results.loggers.base import NoLogger, Opening
from specbench.results.loggers.wandb import WandbLogger
from specbench.results.loggers.wandb_records import Running, config_columns
from specbench.results.loggers.wandb_records import summary as summary_of
from specbench.results.reader import read_result
from specbench.results.writer import write_result
from specbench.run.execute import logged
from specbench.run.jobs import RunJob
from specbench.run.run import run


def few(good: Path) -> list[str]:
    """Overrides of the smallest run."""
    return ["temperature=0", "verdict_tokens=0", "executor=eager", "drafter=random", "max_new_tokens=6",
            f"target.path={good}"]  # fmt: skip


@pytest.fixture(autouse=True)
def _without_figures(no_figures):
    """Drawing them is most of such a small run's time."""


@pytest.fixture(scope="module")
def one(good, tmp_path_factory) -> SimpleNamespace:
    """The smallest run, stored, and what its groups say while it decodes."""
    folder, lines, running = tmp_path_factory.mktemp("one"), [], Running()
    parts = parts_of(*few(good))
    result, record = run(parts, folder, on_group=lambda group: lines.append(running.add(group)))
    write_result(result, record, "digest", folder, parts.target.tokenizer)
    return SimpleNamespace(folder=folder, result=result, record=record, lines=lines)


def records(folder: Path) -> list[WandbRecord]:
    """What the one W&B run of a folder wrote. W&B's own process may end its file after `finish` has returned."""
    [path] = folder.glob("wandb/offline-run-*/run-*.wandb")
    for _ in range(100):
        if "exit" in kinds(found := parsed(path.read_bytes())):
            break
        time.sleep(0.1)
    return found


def parsed(data: bytes) -> list[WandbRecord]:
    """The records in the log format of a file: blocks of 32 KiB, pieces with 7 bytes of checksum, length and kind (1
    whole, 2 first, 3 middle, 4 last)."""
    at, piece, found = 7, b"", []
    while at + 7 <= len(data):
        if (room := 32768 - at % 32768) < 7:
            at += room
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        at += 7 + size
        piece += data[at - size : at]
        if kind in (1, 4):
            found.append(WandbRecord.FromString(piece))
            piece = b""
    return found


def key_of(item) -> str:
    return item.key or ".".join(item.nested_key)


def history(found: list[WandbRecord]) -> list[dict]:
    lines = [r.history.item for r in found if r.WhichOneof("record_type") == "history"]
    return [{key_of(item): json.loads(item.value_json) for item in line} for line in lines]


def summary(found: list[WandbRecord]) -> dict:
    values: dict = {}
    for r in found:
        if r.WhichOneof("record_type") == "summary":
            values |= {key_of(item): json.loads(item.value_json) for item in r.summary.update}
    return {key: value for key, value in values.items() if not key.startswith("_")}


def kinds(found: list[WandbRecord]) -> list[str]:
    return [r.WhichOneof("record_type") for r in found]


def opened(found: list[WandbRecord]):
    """Group and kind of the run, and its configuration."""
    [run] = [r.run for r in found if r.WhichOneof("record_type") == "run"]
    return (run.run_group, run.job_type), {key_of(item): json.loads(item.value_json) for item in run.config.update}


def exit_codes(found: list[WandbRecord]) -> list[int]:
    return [r.exit.exit_code for r in found if r.WhichOneof("record_type") == "exit"]


def test_a_run_is_followed_while_it_decodes(good, monkeypatch, tmp_path):
    assert call(small(*few(good), "name=mine", "hydra.run.dir=out"), monkeypatch, tmp_path) == 0
    found, result = records(tmp_path / "out"), json.loads((tmp_path / "out" / "results.json").read_text())
    lines, last = history(found), summary(found)
    live = [line for line in lines if "progress/prompts" in line]
    rounds = [line for line in lines if "round/number" in line]
    assert [line["progress/prompts"] for line in live] == [1, 2]  # one line a group, before those of the rounds
    assert lines[:2] == live and len(rounds) == result["counts"]["rounds"]
    assert live[-1]["progress/alpha"] == pytest.approx(result["alpha"]["mean"])
    assert live[-1]["progress/speedup"] == pytest.approx(result["speedup"]["measured"])
    assert live[0]["_timestamp"] < live[1]["_timestamp"]
    order = kinds(found)
    assert order.count("run") == order.count("exit") == 1
    assert "stats" in order or wandb.__version__.startswith("0.20.")  # the machine's use, which 0.20 did not write here

    names, config = opened(found)
    assert names == ("mine", "run")
    assert config["drafter"] == "random" and config["temperature"] == 0 and config["gamma_policy"] == "fixed"
    assert not any("_target_" in str(key) or "specbench." in str(value) for key, value in config.items())

    assert last["alpha"] == result["alpha"]["mean"] and last["status"] == "complete"
    assert not [key for key in last if key.startswith(("round", "progress", "figures", "media"))]
    assert not any(isinstance(value, dict) for value in last.values())


@pytest.mark.slow
def test_an_interrupted_run_and_one_that_fails_are_marked(good, monkeypatch, tmp_path):
    interrupt_the_second_group(monkeypatch)
    assert call(small(*few(good), "hydra.run.dir=cut"), monkeypatch, tmp_path) == 130
    found = records(tmp_path / "cut")
    assert summary(found)["status"] == "interrupted" and exit_codes(found) == [130]
    assert [line["progress/prompts"] for line in history(found) if "progress/prompts" in line] == [1]
    monkeypatch.undo()

    def full(*arguments):
        raise ConfigError("no space left")

    monkeypatch.setattr("specbench.run.execute.write_result", full)
    assert call(small(*few(good), "hydra.run.dir=bad"), monkeypatch, tmp_path) == 2
    found = records(tmp_path / "bad")
    assert summary(found)["status"] == "failed" and len(history(found)) == 2 and exit_codes(found) == [1]


@pytest.mark.slow  # test_repeats_have_a_run_for_all_processes has a table
def test_a_sweep_has_a_run_for_its_table(good, monkeypatch, tmp_path):
    words = ["-m", *small(*few(good), "gamma=1,2", "name=two", "data.limit=1")]
    assert call(words, monkeypatch, tmp_path) == 0
    sweep = tmp_path / "outputs" / "two"
    assert opened(records(sweep))[0] == ("two", "sweep")
    [line] = [line for line in history(records(sweep)) if any(key.startswith("media/jobs") for key in line)]
    [table] = sweep.glob("wandb/offline-run-*/files/media/table/media/jobs_*.json")
    stored = json.loads(table.read_text())
    assert len(stored["data"]) == 2 and stored["columns"][0] == "gamma" and line
    assert {opened(records(folder))[0] for folder in sweep.glob("*gamma*")} == {("two", "job")}
    assert call(words, monkeypatch, tmp_path) == 0  # every job is skipped: the sweep is not logged again
    assert len([*sweep.glob("wandb/offline-run-*")]) == 1


def test_repeats_have_a_run_for_all_processes(good, one, tmp_path):
    folder = shutil.copytree(one.folder, tmp_path / "out")
    checked = check(composed(*small(*few(good), "logger=none")))
    result = read_result(folder)
    rows = [{"process": f"repeat={number}", "speedup": 1.0 + number} for number in range(2)]
    settings = WandbLogger.Settings(mode="offline", project="p", entity=None, tags=[])
    choices = {group: chosen.name for group, chosen in checked.choices.groups.items()}
    opening = Opening("mine", checked.resolved, choices, folder, "repeats")
    WandbLogger(settings).log_repeats(opening, result, rows)
    names, config = opened(records(folder))
    assert names == ("mine", "repeats") and config["drafter"] == "random"
    last = summary(records(folder))
    assert last["speedup/measured"] == result["speedup"]["measured"] and last["processes"] == 2
    [table] = folder.glob("wandb/offline-run-*/files/media/table/media/processes_*.json")
    assert json.loads(table.read_text())["data"] == [["repeat=0", 1.0], ["repeat=1", 2.0]]
    assert (folder / "report.html").is_file()


def test_a_logger_that_fails_is_told_no_more_and_the_run_goes_on(good, monkeypatch, tmp_path, caplog):
    told = []

    def fails(self, group):
        told.append(group)
        raise OSError("no network")

    monkeypatch.setattr(NoLogger, "progress", fails)
    checked = check(composed(*small(*few(good), "logger=none")))
    with logged(RunJob([], tmp_path, checked)) as run_log:
        result, record = run(parts_of(*few(good)), tmp_path, on_group=run_log.progress)
        run_log.finish(result, record)
    assert result.counts.prompts == 2 and len(told) == 1
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == ["logger=none is not told of further requests (no network)"]


def test_a_logger_that_cannot_be_opened_stops_the_run_before_it_decodes(monkeypatch, tmp_path):
    def fails(self, opening):
        raise OSError("log in first")

    monkeypatch.setattr(NoLogger, "open", fails)
    with pytest.raises(ConfigError, match="base class"):  # as one of a user's without `log`
        check(composed(*small("logger=none", "logger._target_=specbench.results.loggers.base.Logger")))
    with pytest.raises(ConfigError, match=r"logger=none could not be opened \(log in first\)"):  # noqa: SIM117
        with logged(RunJob([], tmp_path, check(composed(*small("logger=none"))))):
            raise AssertionError("it decoded")


def test_running_numbers_are_sums_over_groups(one):
    """Against the record of the whole run."""
    lines, result, record = one.lines, one.result, one.record
    assert lines[0] != lines[1] and lines[0]["progress/prompts"] == 1
    assert lines[1]["progress/rounds"] == result.counts.rounds and lines[1]["progress/tokens"] == result.counts.tokens
    assert lines[1]["progress/tokens_a_round"] == pytest.approx(result.block_efficiency.mean)
    assert len(record.groups) == 2


def test_intervals_are_in_the_summary_and_missing_ones_are_not(one):
    result = one.result
    assert not [key for key in summary_of(result.as_dict()) if key.startswith("speedup/ci95")]  # of two prompts
    cost = replace(result.cost, ci95={"c": (0.1, 0.3), "v": None})
    changed = replace(result, cost=cost, speedup=replace(result.speedup, ci95=(1.25, 1.5)))
    told = summary_of(changed.as_dict() | {"by_length": {"128 to 511": {"alpha": {"mean": 0.5}}}})
    assert told["by_length/128 to 511/alpha/mean"] == 0.5
    assert (told["speedup/ci95/low"], told["speedup/ci95/high"]) == (1.25, 1.5)
    assert (told["cost/ci95/c/low"], told["cost/ci95/c/high"]) == (0.1, 0.3) and "cost/ci95/v" not in told
    assert not any(isinstance(value, list | tuple | dict) for value in told.values())


def test_columns_name_the_choice():
    config = {"gamma": 4, "drafter": {"_target_": "a.B", "path": "x"}, "metrics": {}}
    assert config_columns(config, {"drafter": "model"}) == {"gamma": 4, "drafter": "model", "drafter.path": "x"}
