"""The loggers: what W&B's own file holds of a run, and of one that is cut short."""

import json
import struct
import time
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from records import records
from small_runs import composed
from stored import stored
from wandb.proto.wandb_internal_pb2 import Record as WandbRecord

from specbench.config.check import check
from specbench.errors import ConfigError
from specbench.report import wandb
from specbench.report.files import Opening, Run
from specbench.report.wandb import WandbLogger

CONFIG = {"gamma": 4, "drafter": {"_target_": "specbench.drafters.X", "path": "x"}}


def logger() -> WandbLogger:
    return WandbLogger(mode="offline", project="p", entity=None)


def opening(folder: Path, kind: str = "run") -> Opening:
    return Opening("mine", folder, CONFIG, {"drafter": "model"}, kind)


class Offline:
    """What the one W&B run of a folder wrote."""

    def __init__(self, folder: Path):
        [path] = folder.glob("wandb/offline-run-*/run-*.wandb")
        for _ in range(100):  # W&B's own process may end its file after `finish` has returned
            self.records = parsed(path.read_bytes())
            if self.of("exit"):
                break
            time.sleep(0.1)
        self.folder = path.parent

    def of(self, kind: str) -> list[WandbRecord]:
        return [found for found in self.records if found.WhichOneof("record_type") == kind]

    def history(self) -> list[dict]:
        return [values(found.history.item) for found in self.of("history")]

    def summary(self) -> dict:
        merged: dict = {}
        for found in self.of("summary"):
            merged |= values(found.summary.update)
        return {key: value for key, value in merged.items() if not key.startswith("_")}

    def table(self, name: str) -> dict:
        [path] = self.folder.glob(f"files/media/table/{name}_*.json")
        return json.loads(path.read_text())


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
        if at > len(data):  # not written to its end yet
            break
        piece += data[at - size : at]
        if kind in (1, 4):
            found.append(WandbRecord.FromString(piece))
            piece = b""
    return found


def values(items) -> dict:
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


@pytest.fixture(scope="module")
def logged(tmp_path_factory) -> tuple[Run, Offline]:
    """A run that was followed from its first request to its files."""
    folder = tmp_path_factory.mktemp("logged")
    own = logger()
    own.open(opening(folder))
    for record in records():
        own.progress(record)
    run = stored(folder)
    own.finish(run)
    return run, Offline(folder)


def test_requests_are_followed_live(logged):
    run, offline = logged
    live = [line for line in offline.history() if "progress/prompts" in line]
    assert [line["progress/prompts"] for line in live] == list(range(1, len(run.records) + 1))
    assert live == offline.history()[: len(live)]  # before the rounds, which are logged at the end
    assert live[-1]["progress/alpha"] == pytest.approx(run.results["alpha"]["mean"])
    assert live[-1]["progress/speedup"] == pytest.approx(run.results["speedup"]["measured"])
    assert live[-1]["progress/block_efficiency"] == pytest.approx(run.results["block_efficiency"]["mean"])


def test_every_round_is_in_the_history(logged):
    run, offline = logged
    rounds = [line for line in offline.history() if "round/number" in line]
    assert len(rounds) == run.results["counts"]["rounds"]
    assert sum(line["round/tokens"] for line in rounds) == run.results["counts"]["tokens"]
    assert sum(line["round/accepted"] for line in rounds) == run.results["counts"]["accepted"]


def test_the_summary_has_the_names_of_results_json(logged):
    run, offline = logged
    summary, results = offline.summary(), run.results
    assert summary["alpha/mean"] == results["alpha"]["mean"]
    assert summary["speedup/measured"] == results["speedup"]["measured"]
    assert [summary["speedup/ci95/low"], summary["speedup/ci95/high"]] == pytest.approx(results["speedup"]["ci95"])
    assert summary["cost/ci95/c/low"] == pytest.approx(results["cost"]["ci95"]["c"][0])
    assert summary["counts/rounds"] == results["counts"]["rounds"] and summary["status"] == "complete"
    for entry in results["speedup"]["accounting"]:
        assert summary[f"speedup/accounting/{entry['factor']}"] == entry["value"]
    for category in results["by_category"]:
        assert summary[f"by_category/{category['category']}/alpha/mean"] == category["alpha"]["mean"]
    assert {key.split("/")[0] for key in summary if not key.startswith(("page", "tables"))} <= results.keys()
    assert not any(value is None or isinstance(value, list) for value in summary.values())


def test_the_run_is_named_and_has_its_configuration(logged):
    _, offline = logged
    [found] = [record.run for record in offline.of("run")]
    assert (found.run_group, found.job_type) == ("mine", "run")
    config = values(found.config.update)
    assert config["drafter"] == "model" and config["drafter.path"] == "x" and config["gamma"] == 4
    assert not any("_target_" in str(key) for key in config)
    assert [record.exit.exit_code for record in offline.of("exit")] == [0]


def test_tables_and_the_page_are_logged(logged):
    run, offline = logged
    prompts = offline.table("tables/prompts")
    columns = {name: [row[at] for row in prompts["data"]] for at, name in enumerate(prompts["columns"])}
    assert columns["id"] == [record.id for record in run.records]
    assert columns["text"] == [record.speculative.text for record in run.records]
    assert sum(columns["tokens"]) == run.results["counts"]["tokens"]
    categories = offline.table("tables/by_category")
    assert len(categories["data"]) == len(run.results["by_category"])
    assert [*offline.folder.glob("files/media/html/page_*.html")]


@pytest.mark.parametrize(("status", "code"), [("interrupted", 130), ("failed", 1)])
def test_a_run_that_is_cut_short_is_marked(status, code, tmp_path):
    own = logger()
    own.open(opening(tmp_path, "job"))
    own.progress(records(1)[0])
    own.abandon(status)
    own.abandon(status)  # once more does nothing
    offline = Offline(tmp_path)
    assert offline.summary()["status"] == status and len(offline.history()) == 1
    assert [record.exit.exit_code for record in offline.of("exit")] == [code]


def test_jobs_of_one_command_have_ids_of_their_own(monkeypatch, tmp_path):
    found = []
    monkeypatch.setattr("wandb.init", lambda **given: found.append(given["id"]) or MagicMock())
    monkeypatch.setenv("WANDB_RUN_ID", "abc")
    for kind in ("run", "repeats", "job", "job", "method"):
        WandbLogger("offline", "p", None).open(opening(tmp_path, kind))
    assert found[:2] == ["abc", "abc"] and len({*found}) == 4 and all(found)


def test_variables_of_wandb_are_defaults(monkeypatch):
    for name, value in {"MODE": "disabled", "PROJECT": "theirs", "ENTITY": "me"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    settings = check(composed("logger=wandb")).choices["logger"].settings
    assert (settings.mode, settings.project, settings.entity) == ("disabled", "theirs", "me")
    assert check(composed("logger=wandb", "logger.mode=offline")).choices["logger"].settings.mode == "offline"
    monkeypatch.setenv("WANDB_MODE", "sometimes")
    with pytest.raises(ConfigError, match="=sometimes is not allowed: it must be one of offline"):
        check(composed("logger=wandb"))


def test_long_runs_are_thinned(monkeypatch):
    every = wandb.history(records(3))
    monkeypatch.setattr(wandb, "MOST_ROUNDS", 10)
    thinned = wandb.history(records(3))
    assert 5 <= len(thinned) <= 10 and thinned == every[:: every.index(thinned[1])]


def test_the_blocks_of_a_dashboard(logged):
    pytest.importorskip("wandb_workspaces")
    run, _ = logged
    found = wandb.blocks("entity/project", [run])
    grid = next(block for block in found if type(block).__name__ == "PanelGrid")
    keys = {key for metrics in wandb.PANELS.values() for key in metrics}
    assert keys <= wandb.summary(run.results).keys()
    drawn = {str(metric) for panel in grid.panels for metric in getattr(panel, "metrics", [])}
    assert all(any(key in metric for metric in drawn) for key in keys)
    assert grid.runsets[0].project == "project" and grid.runsets[0].entity == "entity"
