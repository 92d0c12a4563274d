"""The files of a run: what can be used again, what cannot be read, who may write, and what a signal or a full disk
leaves."""

import contextlib
import dataclasses
import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet as parquet
import pytest
from choosing import slow_unless
from small_runs import call as typed
from small_runs import composed, parts_of, small, steady

import specbench.models.load
import specbench.results.report.command as report
import specbench.run.run
from specbench.config.validate import check
from specbench.data.prompts import Data, Prompt, load
from specbench.decoding.sampling import Sampling
from specbench.errors import ConfigError
from specbench.executors import native
from specbench.results import fingerprint
from specbench.results.atomic_files import write_text
from specbench.results.completion import FILES, contents, examine
from specbench.results.folder_lock import locked
from specbench.results.reader import load_runs
from specbench.results.writer import PromptsFile
from specbench.run.interleave import InterleavedGroup
from specbench.run.run import run

OPTIONS = ["drafter=random", "temperature=0", "executor=eager", "logger=none", "max_new_tokens=4"]
ONE = [*OPTIONS, "gamma=1"]  # without a sweep of gamma; little to warm up


def call(arguments, monkeypatch, folder) -> int:
    """The command in this process: its exit code."""
    flags = [argument for argument in arguments if argument == "-m"]
    overrides = [argument for argument in arguments if argument != "-m"]
    options = OPTIONS if any(override.startswith("gamma=") for override in overrides) else ONE
    return typed([*flags, *small(*options, *overrides)], monkeypatch, folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A finished run of two prompts."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch, steady():
        assert call([f"hydra.run.dir={folder}"], patch, folder.parent) == 0
    return folder


@pytest.fixture(scope="module")
def wanted():
    """The identity of a run like `whole`."""
    return check(composed(*small(*ONE))).identity()


def edited(path, *keys, value=None):
    """Puts a value into a JSON file; without one, takes the key out."""
    tree = json.loads(path.read_text())
    place = tree
    for key in keys[:-1]:
        place = place[key]
    if value is None:
        del place[keys[-1]]
    else:
        place[keys[-1]] = value
    path.write_text(json.dumps(tree))


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def without_column(path, name):
    parquet.write_table(parquet.read_table(path).drop_columns([name]), path)


def a_pipe(path):
    path.unlink()
    os.mkfifo(path)


def with_null(path):
    found = parquet.read_table(path)
    place, nulls = found.column_names.index("own_text"), pyarrow.nulls(len(found), pyarrow.string())
    parquet.write_table(found.set_column(place, "own_text", nulls), path)


COST = {"gamma": 1, "draft_seconds": 1, "verify_seconds": 1, "other_seconds": 1, "share": 1, "rounds": 1}


def to(*keys, value=None):
    """Edits a JSON file, as `edited` does."""
    return lambda path: edited(path, *keys, value=value)


def written(content):
    return lambda path: path.write_bytes(content)


BROKEN = [  # the file, what is done to it, words of the sentence
    ("results.json", cut, "is not JSON"),
    ("results.json", written(b"null"), "it is None, not an object"),
    ("results.json", written(b"[]"), "it is [], not an object"),
    ("results.json", written(b'{"a": 1}'), "it has no alpha"),
    ("results.json", written(b"\xff\xfe{}"), "codec can't decode"),
    ("results.json", written(b"[" * 10**5), "is not JSON"),
    ("results.json", a_pipe, "it is not a file"),
    ("results.json", to("speedup", "measured"), "speedup.measured"),
    ("results.json", to("cost", "v", value="1"), "cost.v is '1'"),
    ("results.json", to("speedup", "ci95", value=[1.0]), "it has no speedup.ci95[1]"),
    ("results.json", to("counts", "rounds", value=True), "not an integer"),
    ("results.json", to("speedup", "measured", value=float("inf")), "not a finite number"),
    ("results.json", to("cost", "by_gamma", value=[COST, COST]), "cost.by_gamma"),
    ("results.json", to("cost", "by_gamma", value=[]), "cost.by_gamma"),
    ("results.json", to("counts", "rounds", value=0), "its counts"),
    ("results.json", to("schema_version", value=9), "of a newer specbench"),
    ("rounds.parquet", written(b"PAR1garbage"), "cannot be read"),
    ("rounds.parquet", Path.unlink, "cannot be read"),
    ("rounds.parquet", lambda path: without_column(path, "rows"), "no column rows"),
    ("rounds.parquet", with_null, "its column own_text holds null"),
    ("rounds.parquet", lambda path: parquet.write_table(parquet.read_table(path)[1:], path), "results.json counts"),
    ("prompts.jsonl", lambda path: path.write_text(path.read_text().split("\n")[0] + "\n"), "it has 1 lines"),
    ("prompts.jsonl", lambda path: path.write_text(path.read_text()[:-9]), "line 2 is not JSON"),
    ("prompts.jsonl", written(b"null\nnull\n"), "line 1 cannot be used"),
    ("prompts.jsonl", written(b"\xff\n"), "codec can't decode"),
    ("prompts.jsonl", lambda path: path.write_text(path.read_text().replace('"id": "', '"id": "x')), "no line for"),
]
ONLY_REPLAY = [
    ("positions.parquet", Path.unlink, "cannot be read"),
    ("positions.parquet", lambda path: parquet.write_table(parquet.read_table(path)[1:], path), "prompts.jsonl says"),
    ("positions.parquet", lambda path: without_column(path, "beta"), "no column beta"),
]


@pytest.fixture
def copied(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def ends(main, arguments, capsys) -> str:
    """The sentence with which a command ends."""
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("specbench:") == 1 and "Traceback" not in err
    return err


@pytest.mark.parametrize(("name", "break_it", "expected"), [*BROKEN, *ONLY_REPLAY])
def test_files_that_cannot_be_used_are_a_sentence_and_are_not_skipped(name, break_it, expected, copied, wanted, capsys):
    break_it(copied / name)
    for main in () if name == "positions.parquet" else (report.main,):
        told = ends(main, [str(copied)], capsys)
        assert expected in told and name in told
    assert examine(copied, wanted).corrupt


def test_all_sources_of_the_package_are_its_code(monkeypatch):
    read = []
    monkeypatch.setattr(fingerprint, "file_hash", lambda path: read.append(path) or "")
    fingerprint.of_code.__wrapped__()
    assert {native.SOURCE, Path(fingerprint.__file__)} <= {*read}


def test_a_whole_folder_is_finished_until_something_differs(whole, wanted):
    assert examine(whole, wanted).finished
    other = check(composed(*small(*ONE, "seed=2"))).identity()
    assert examine(whole, other).differs == ["seed"]
    newer = dataclasses.replace(wanted, code={**wanted.code, "specbench": "newer"})
    assert examine(whole, newer).differs == ["the code of specbench"]
    faster = dataclasses.replace(wanted, device={**wanted.device, "device": "another"})
    assert examine(whole, faster).differs == ["the device"]


@pytest.mark.parametrize("name", FILES)
def test_every_file_that_is_gone_is_noticed(name, copied, wanted):
    (copied / name).unlink()
    assert name in examine(copied, wanted).corrupt


def test_a_source_that_changed_differs(tmp_path):
    """A data file of the same size, a text of counts, a checkpoint's weights, heads, and a model below."""
    for name in ("model", "heads"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"model_type": "specbench_heads"}')
        (tmp_path / name / "generation_config.json").write_text("one")
        (tmp_path / name / "model.safetensors").write_text("one")
    (tmp_path / "text").write_text("one")
    (tmp_path / "p.jsonl").write_text('{"prompt": "one"}\n')
    model, heads, text = (f"{tmp_path / name}" for name in ("model", "heads", "text"))
    wholes = {
        "p.jsonl": ("data.path", ["data=jsonl", f"data.path={tmp_path / 'p.jsonl'}"]),
        "text": ("drafter.path", ["drafter=bigram", f"drafter.path={text}"]),
        "model/model.safetensors": ("target.path", [f"target.path={model}"]),
        "heads/generation_config.json": ("drafter.path", ["drafter=medusa", f"drafter.path={heads}"]),
        "model/config.json": ("drafter.paths[0]", ["drafter=multi_draft", f"drafter.paths=[{model}]"]),
        "heads/model.safetensors": ("drafter.head", ["drafter=early_exit", f"drafter.head={heads}"]),
    }
    below = ["drafter=hierarchical", "drafter@drafter.below=unigram", f"drafter.below.path={text}"]
    for name, (key, overrides) in [*wholes.items(), ("text", ("drafter.below.path", below))]:
        before = check(composed(*overrides)).identity()
        path = tmp_path / name
        path.write_text(path.read_text().replace("one", "two") if "one" in path.read_text() else '{"a": 1}')
        os.utime(path, ns=(1, 1))
        after = check(composed(*overrides)).identity()
        assert after.differs_from(before.as_dict(), before.settings) == [f"the contents of {key}"]
        path.write_text(path.read_text().replace("two", "one"))


def test_a_bad_run_is_left_out_of_a_comparison(whole, tmp_path, caplog, capsys):
    for name in ("gamma=1", "gamma=2", "gamma=3"):
        shutil.copytree(whole, tmp_path / name)
    (tmp_path / "gamma=2" / "results.json").write_text("null")
    (tmp_path / "gamma=3" / "results.json").unlink()
    assert [found.folder.name for found in load_runs(tmp_path)] == ["gamma=1"]
    assert "gamma=2/results.json cannot be used" in caplog.text and "gamma=3 is not a finished run" in caplog.text
    (tmp_path / "gamma=1" / "results.json").write_text("[]")
    assert "holds no finished run" in ends(report.main, [str(tmp_path)], capsys)


def test_text_may_hold_other_separators_of_lines(copied):
    """JSON leaves U+2028 and U+0085 as they are, and some readers end a line there."""
    path = copied / "prompts.jsonl"
    lines = [json.loads(line) | {"output": "a\u2028b\x85c"} for line in path.read_text().split("\n")[:-1]]
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    assert [prompt["output"] for prompt in load_runs(copied)[0].prompts] == ["a\u2028b\x85c"] * 2


def test_a_folder_is_locked_by_a_process_until_it_ends(tmp_path):
    hold = "import sys; from specbench.results.folder_lock import locked; from pathlib import Path\n" \
           "with locked(Path(sys.argv[1])): print('held', flush=True); input()"  # fmt: skip
    process = subprocess.Popen([sys.executable, "-c", hold, tmp_path], stdout=subprocess.PIPE, stdin=subprocess.PIPE)
    assert process.stdout.readline() == b"held\n"
    with pytest.raises(ConfigError, match=f"is being written by process {process.pid}"), locked(tmp_path):
        pass
    process.kill()
    process.communicate()
    (tmp_path / "rounds.parquet.1.tmp").write_text("half")
    with locked(tmp_path):
        assert [path.name for path in tmp_path.iterdir()] == [".lock"]


@pytest.mark.slow
def test_a_multirun_redoes_what_is_broken_and_says_what_differed(monkeypatch, tmp_path, capsys):
    """Of four jobs one is whole, two are broken, and one is another process's."""
    arguments = ["-m", "name=s", "gamma=1,2,3", "data.limit=1"]
    assert call(arguments, monkeypatch, tmp_path) == 0
    sweep = tmp_path / "outputs" / "s"
    first, second, third = (next(sweep.glob(f"*gamma={gamma}*")) for gamma in (1, 2, 3))
    stamp = (first / "results.json").stat().st_mtime_ns
    cut(second / "rounds.parquet")
    (third / "results.json").write_bytes(b"\xff")
    capsys.readouterr()
    with locked(second):
        assert call(arguments, monkeypatch, tmp_path) == 1
    err = capsys.readouterr().err
    assert "is being written by process" in err and "Traceback" not in err
    assert (third / "corrupt-1" / "results.json").read_bytes() == b"\xff" and "moved to" in err
    assert "no result" in (sweep / "summary.csv").read_text()
    assert call(arguments, monkeypatch, tmp_path) == 0
    assert (second / "corrupt-1" / "rounds.parquet").is_file()
    assert "rounds.parquet is not the file that results.json was written with" in capsys.readouterr().err
    assert (first / "results.json").stat().st_mtime_ns == stamp
    assert "no result" not in (sweep / "summary.csv").read_text()
    for name, content in json.loads((second / "results.json").read_text())["identity"]["files"].items():
        assert contents(second / name) == content


@pytest.mark.parametrize(("name", "arguments", "expected"), [
    ("out", ["hydra.run.dir=out"], "out cannot be used (File exists)"),
    ("out", ["hydra.run.dir=out/a"], "cannot be used (Not a directory)"),
    ("outputs", ["-m", "gamma=1,2"], "outputs is a file where a folder should be"),
    ("out/run.log/", ["hydra.run.dir=out"], "run.log cannot be used (Is a directory)"),
    ("out/.lock/", ["hydra.run.dir=out"], ".lock cannot be written (Is a directory)"),
])  # fmt: skip
def test_what_is_in_the_way_is_a_sentence(name, arguments, expected, monkeypatch, tmp_path, capsys):
    """A file where a folder must be, or a folder where a file must be."""
    if name.endswith("/"):
        (tmp_path / name).mkdir(parents=True)
    else:
        (tmp_path / name).write_text("in the way")
    assert call(arguments, monkeypatch, tmp_path) == 2
    err = capsys.readouterr().err
    assert expected in err and "Traceback" not in err


@pytest.fixture
def small_files():
    """Files cannot grow beyond 1,000 bytes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_what_was_finished(small_files, tmp_path):
    (tmp_path / "results.json").write_text("before")
    with pytest.raises(ConfigError, match=r"results\.json cannot be written \(File too large\)"):
        write_text(tmp_path / "results.json", "x" * 2000)
    with contextlib.closing(PromptsFile(tmp_path)) as saved:
        saved.append([{"id": "a"}])
        with pytest.raises(ConfigError, match="cannot be written"):
            saved.append([{"id": "b"}, {"id": "x" * 2000}])
        saved.append([{"id": "c"}])
    assert (tmp_path / "prompts.jsonl.part").read_text() == '{"id": "a"}\n{"id": "c"}\n'
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "prompts.jsonl.part"}
    assert (tmp_path / "results.json").read_text() == "before"


def test_a_disk_that_is_full_at_the_end_is_a_sentence(monkeypatch, tmp_path, capsys):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pyarrow.parquet, "ParquetWriter", full)
    monkeypatch.setattr("specbench.results.atomic_files.ROOM_SECONDS", 0)
    assert call(["hydra.run.dir=out"], monkeypatch, tmp_path) == 2
    err = capsys.readouterr().err
    assert "rounds.parquet cannot be written (No space left on device)" in err and "Traceback" not in err
    assert len((tmp_path / "out" / "prompts.jsonl").read_text().splitlines()) == 2
    assert not (tmp_path / "out" / "results.json").exists()


def test_a_run_that_fails_leaves_what_was_finished(monkeypatch, tmp_path, capsys):
    """A mistake that shows only when prompts are decoded, in a folder of finished results."""
    assert call(["hydra.run.dir=out"], monkeypatch, tmp_path) == 0
    before = {name: contents(tmp_path / "out" / name) for name in ("results.json", *FILES)}
    assert call(["hydra.run.dir=out", "cache=paged", "cache.blocks=1"], monkeypatch, tmp_path) == 2
    assert "cache.blocks" in capsys.readouterr().err
    assert {name: contents(tmp_path / "out" / name) for name in before} == before


def test_a_logger_that_fails_leaves_the_results_and_says_so(monkeypatch, tmp_path, capsys):
    def fails(*arguments):
        raise ConnectionError("no network")

    monkeypatch.setattr("specbench.results.loggers.base.NoLogger.log", fails)
    assert call(["hydra.run.dir=out"], monkeypatch, tmp_path) == 2
    assert "logger=none failed (no network): the results are in" in " ".join(capsys.readouterr().err.split())
    assert load_runs(tmp_path / "out")


@pytest.mark.slow
def test_a_run_without_finite_numbers_is_written_read_and_failed(monkeypatch, tmp_path, capsys):
    probabilities = Sampling.probabilities
    monkeypatch.setattr(Sampling, "probabilities", lambda *a: probabilities(*a) * float("nan"))
    assert call(["hydra.run.dir=out", "strict=true", "temperature=1"], monkeypatch, tmp_path) == 3
    (found,) = load_runs(tmp_path / "out")
    assert found.result["lossless"]["verdict"] == "failed"
    report.main([str(tmp_path / "out")])
    assert "not finite" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.slow
def test_a_checkpoint_that_arrives_during_a_sweep_counts_as_it_is_then(monkeypatch, tmp_path):
    """Of the hub a commit is known only when it has been loaded."""
    loaded = []
    load = specbench.models.load.load_module
    monkeypatch.setattr(specbench.models.load, "load_module", lambda *a: (loaded.append(1), load(*a))[1])
    monkeypatch.setattr(specbench.models.load, "of_checkpoint", lambda *a: "commit" if loaded else "main")
    assert call(["-m", "name=s", "gamma=1"], monkeypatch, tmp_path) == 0
    assert "no result" not in (tmp_path / "outputs" / "s" / "summary.csv").read_text()


@pytest.fixture
def signals(monkeypatch):
    """Sends real signals to this process: one while the second group decodes, the others while results are made."""

    def send(while_decoding, *while_summarising):
        decode, summarise = InterleavedGroup.decode_all_ways, specbench.run.run.run_result

        def decoding(self, wanted, jobs, number):
            if number == 1:
                os.kill(os.getpid(), while_decoding)
            return decode(self, wanted, jobs, number)

        def summarising(*arguments):
            for number in while_summarising:
                os.kill(os.getpid(), number)
            return summarise(*arguments)

        monkeypatch.setattr(InterleavedGroup, "decode_all_ways", decoding)
        monkeypatch.setattr(specbench.run.run, "run_result", summarising)

    return send


@pytest.mark.parametrize("sent", [
    slow_unless(False, (signal.SIGTERM,)), (signal.SIGINT, signal.SIGINT, signal.SIGTERM)
])  # fmt: skip
def test_signals_keep_what_was_finished(sent, signals, wanted, monkeypatch, tmp_path, capsys):
    signals(*sent)
    before = signal.getsignal(signal.SIGINT)
    assert call(["hydra.run.dir=out"], monkeypatch, tmp_path) == 128 + sent[0]
    result = json.loads((tmp_path / "out" / "results.json").read_text())
    assert result["status"] == "interrupted" and result["counts"]["prompts"] == 1
    assert len((tmp_path / "out" / "prompts.jsonl").read_text().splitlines()) == 1
    assert "interrupted: what was finished is in" in " ".join(capsys.readouterr().err.split())
    assert signal.getsignal(signal.SIGINT) is before and not examine(tmp_path / "out", wanted).finished


def test_an_interrupted_multirun_starts_no_other_job_and_has_a_summary(signals, monkeypatch, tmp_path, capsys):
    assert call(["-m", "name=s", "gamma=1"], monkeypatch, tmp_path) == 0
    signals(signal.SIGINT)
    assert call(["-m", "name=s", "gamma=1,2,3"], monkeypatch, tmp_path) == 130
    err = capsys.readouterr().err
    rows = (tmp_path / "outputs" / "s" / "summary.csv").read_text().splitlines()
    assert [row.count("no result") for row in rows[1:]] == [0, 1, 1]
    assert "interrupted: 2 of 3 jobs have no result" in err
    assert len(list((tmp_path / "outputs" / "s").glob("*/results.json"))) == 2


class Listed(Data):
    """Prompts with these ids, of two turns or one."""

    def __init__(self, **turns):
        self.turns = turns

    def prompts(self):
        return iter(Prompt(id, ("def f():",) * turns) for id, turns in self.turns.items())


@pytest.mark.slow
def test_turns_have_ids_of_their_own(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps({"question_id": id, "turns": ["a", "b"]}) + "\n" for id in ("a/1", "a")))
    _, record = run(
        parts_of(*OPTIONS[:3], "gamma=1", "max_new_tokens=4", "data=questions", f"data.path={path}"), tmp_path
    )
    assert [found.request.id for found in record.results] == ["a/1/1", "a/1", "a/1/2", "a/2"]
    with pytest.raises(ConfigError, match="ids 1 and 1/1, and a turn of each is called 1/1"):
        load(Listed(**{"1": 2, "1/1": 1}))
