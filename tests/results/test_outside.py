"""What others may have put into a folder, or into data, does no harm: links, formulas, passwords."""

import csv
import errno
import os
import time
from io import FileIO, StringIO
from types import SimpleNamespace

import pytest
from small_runs import call, composed, parts_of, small

from specbench.errors import ConfigError
from specbench.results import atomic_files
from specbench.results.atomic_files import with_room, write_text
from specbench.results.completion import RESULTS
from specbench.results.folder_lock import locked
from specbench.results.reader import load_runs
from specbench.results.table import Cell, Table, to_csv
from specbench.results.writer import PromptsFile, write_result
from specbench.run.api import _files_of_hydra
from specbench.run.jobs import RunJob
from specbench.run.run import run
from specbench.run.sweep import Sweep


def test_links_in_a_folder_are_not_followed_for_writing(monkeypatch, tmp_path, capsys):
    theirs = tmp_path / "theirs"
    theirs.write_text("theirs")
    run = tmp_path / "run"
    run.mkdir()
    for name, write in (
        (".lock", lambda: locked(run).__enter__()),
        ("prompts.jsonl.part", lambda: PromptsFile(run)),
        ("run.log", lambda: _files_of_hydra(composed(), RunJob([], run, None), "").__enter__()),
    ):
        (run / name).symlink_to(theirs)
        with pytest.raises(ConfigError, match=f"{name} cannot be written"):
            write()
        (run / name).unlink()
    (tmp_path / "folder").mkdir()
    (run / ".hydra").symlink_to(tmp_path / "folder")
    with pytest.raises(ConfigError, match=r"\.hydra is a link"):
        _files_of_hydra(composed(), RunJob([], run, None), "").__enter__()
    assert call(small(f"hydra.run.dir={run}"), monkeypatch, tmp_path) == 2 and not [*(tmp_path / "folder").iterdir()]
    (run / ".hydra").unlink()
    (run / "run.log").symlink_to(theirs)
    assert call(small(f"hydra.run.dir={run}"), monkeypatch, tmp_path) == 2 and "run.log" in capsys.readouterr().err
    for name in ("config.yaml", f"config.yaml.{os.getpid()}.tmp"):
        (run / name).symlink_to(theirs)
    write_text(run / "config.yaml", "ours")
    assert theirs.read_text() == "theirs" and (run / "config.yaml").read_text() == "ours"
    assert not (run / "config.yaml").is_symlink()


def test_a_full_disk_is_waited_for_while_decoding_and_at_the_end(monkeypatch, tmp_path):
    """Nothing is decoded again: the lines, each part of a parquet file and results.json are written when there is room.
    Another error is raised at once, and one that stays in the end."""
    full, tried = set(), []

    def room(seconds):
        tried.append(seconds)
        full.clear()

    def refuse(where):
        if where in full:
            raise OSError(errno.ENOSPC, "No space left on device")

    write, writes = FileIO.write, {"prompts.jsonl.part", "rounds.parquet", "positions.parquet", "sums.parquet", RESULTS}
    synchronised = atomic_files.synchronise
    monkeypatch.setattr(atomic_files, "time", SimpleNamespace(sleep=room, monotonic=time.monotonic))
    monkeypatch.setattr(atomic_files, "synchronise", lambda path: (refuse(path.name.split(".")[0]), synchronised(path)))

    class Full(FileIO):
        def write(self, data):
            refuse("prompts")
            return write(self, data)

    monkeypatch.setattr("specbench.results.atomic_files.FileIO", Full)
    parts = parts_of("data.limit=1", "max_new_tokens=3")
    full.add("prompts")
    result, record = run(parts, tmp_path)
    assert len(tried) == 1 and result.counts.prompts == 1
    full |= {"rounds"}
    write_result(result, record, "d", tmp_path, parts.target.tokenizer)
    assert len(tried) == 2 and writes - {"prompts.jsonl.part"} <= {path.name for path in tmp_path.iterdir()}
    for name in ("sums", "results"):
        full.add(name)
        (tmp_path / "prompts.jsonl").rename(tmp_path / "prompts.jsonl.part")
        write_result(result, record, "d", tmp_path, parts.target.tokenizer)
    assert len(tried) == 4 and load_runs(tmp_path)
    monkeypatch.setattr(atomic_files, "ROOM_SECONDS", -1.0)
    full.add("config")
    with pytest.raises(ConfigError, match="No space left on device"):
        with_room(lambda: write_text(tmp_path / "config.yaml", "x"))
    assert len(tried) == 4


def test_cells_of_csv_are_no_formulas():
    cells = ["=cmd|' /C calc'!A0", "-2+3", "@x", "+1+1", "\t=1", "-1.5", "1e5", "a=b", "", -3, None, Cell("=1")]
    read = list(csv.reader(StringIO(to_csv(Table.of([{"=x": cell} for cell in cells], "t", ["=x"])))))
    assert [row[0] if row else "" for row in read] == [
        "'=x",
        "'=cmd|' /C calc'!A0", "'-2+3", "'@x", "'+1+1", "'\t=1", "-1.5", "1e5", "a=b", "", "-3", "", "'=1"]  # fmt: skip


def test_a_sweep_whose_job_is_held_by_another_names_that(monkeypatch, capsys):
    sweep = Sweep()
    sweep.failures.append("D is being written by process 5: wait for it")
    monkeypatch.setattr(sweep, "summarise", lambda: ("1 of 2 jobs have no result, see their run.log", 1))
    with pytest.raises(SystemExit):
        sweep.on_multirun_end(SimpleNamespace())
    assert "have no result, see their run.log; the first has failed: D is being written by process 5" in (
        capsys.readouterr().err
    )
