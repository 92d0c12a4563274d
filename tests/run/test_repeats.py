"""repeats=R: intervals of processes and prompts cover, pooled results, and what happens when a process does not end."""

import csv
import json
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as parquet
import pytest
from choosing import only
from small_runs import call, composed, small, steady

import specbench.run.repeats as repeats
from specbench.config.build import in_seeded_order
from specbench.config.validate import check
from specbench.contrib.cluster import cpu_affinity
from specbench.contrib.replay.trace import load_trace
from specbench.data.prompts import Prompt
from specbench.errors import ConfigError
from specbench.results.completion import contents, examine
from specbench.results.loggers.base import NoLogger
from specbench.results.parquet import load_sums
from specbench.results.reader import load_run
from specbench.results.schema import Placement
from specbench.run.pooled import worst_machine, worst_verdict
from specbench.run.sweep_summary import PlannedJob, SweepJobs, closing_sentence
from specbench.stats import two_way_bootstrap as crossed
from specbench.stats.bootstrap import slopes, student
from specbench.stats.formulas import speedup_of
from specbench.stats.records import PerRequestSums
from specbench.stats.two_way_bootstrap import TwoWaySums

SUMS = ("plain_seconds", "plain_tokens", "seconds", "tokens")


def speedup(s):
    return {"speedup": speedup_of(s)}


def simulated(rng, processes, prompts, of_process, of_prompt, rest):
    """Times whose logarithms have these standard deviations; the speedup is 1 but for them."""
    noise = of_process * rng.standard_normal((processes, 1)) + of_prompt * rng.standard_normal((1, prompts))
    seconds = np.exp(noise + rest * rng.standard_normal((processes, prompts)))
    ones = np.ones_like(seconds)
    table = np.stack([ones, ones, seconds, ones])
    return TwoWaySums(dict(zip(SUMS, table.sum((1, 2)), strict=True)), table)


SPREADS = [(0.0, 0.2, 0.1), (0.1, 0.02, 0.02), (0.02, 0.1, 0.1), (0.05, 0.05, 0.1)]


@pytest.mark.parametrize("processes", only([3], [3, 5, 10]))
@pytest.mark.parametrize("spreads", only(SPREADS[:2], SPREADS))
def test_intervals_cover_whatever_varies(processes, spreads):
    """32 prompts; standard deviations of processes, prompts and the rest, from no variance between processes to nothing
    else. The truth is the ratio of expectations. An interval from prompts alone is the negative control."""
    rng, hits, of_prompts, times = np.random.default_rng(0), 0, 0, 400
    truth = -np.square(spreads).sum() / 2
    for _ in range(times):
        sums = simulated(rng, processes, 32, *spreads)
        low, high = sums.intervals(speedup)["speedup"]
        hits += np.log(low) < truth < np.log(high)
        narrow = student(31) * np.sqrt(sums._variances(slopes(speedup, sums.point)["speedup"])[1])
        of_prompts += abs(np.log(speedup_of(sums.point)) - truth) < narrow
    assert 0.92 <= hits / times <= 0.995
    if spreads[0] >= spreads[1]:
        assert of_prompts / times < 0.7


def requests(rng, prompts, slower=1.0, clusters=None, order=None):
    """The sums of a process: decoding takes `slower` times as long in it."""
    own = rng.lognormal(0, 0.2, (2, prompts))
    columns = {"plain_seconds": own[0], "seconds": own[1] * slower}
    columns |= {"plain_tokens": np.ones(prompts), "tokens": np.ones(prompts)}
    order = np.arange(prompts) if order is None else order
    clusters = list(range(prompts)) if clusters is None else clusters
    names = [f"p{i}" for i in order]
    return PerRequestSums(names, names, [""] * prompts, clusters, [0] * prompts,
                       {name: column[order] for name, column in columns.items()})  # fmt: skip


def of(*processes):
    return TwoWaySums.of(lambda: iter(processes))


def test_prompts_are_crossed_by_their_names_not_by_their_place():
    plain = [requests(np.random.default_rng(seed), 40, 1 + seed / 20) for seed in range(4)]
    expected = of(*plain).intervals(speedup)["speedup"]
    orders = [np.random.default_rng(9 + seed).permutation(40) for seed in range(4)]
    shuffled = [requests(np.random.default_rng(seed), 40, 1 + seed / 20, None, order)
                for seed, order in enumerate(orders)]  # fmt: skip
    assert of(*shuffled).intervals(speedup)["speedup"] == pytest.approx(expected)
    alike = [requests(np.random.default_rng(0), 40) for _ in range(4)]  # every prompt is what it is in all of them
    for sums, order in zip(mixed := [requests(np.random.default_rng(0), 40) for _ in range(4)], orders, strict=True):
        sums.prompts = [f"p{i}" for i in order]  # negative control: other names
    low, high = of(*alike).intervals(speedup)["speedup"]
    narrow, wide = of(*mixed).intervals(speedup)["speedup"]
    assert wide / narrow < high / low


def test_groups_of_rows_are_clusters_only_if_all_processes_have_them():
    pairs, rng = [i // 2 for i in range(12)], np.random.default_rng(0)
    same = [requests(rng, 12, clusters=pairs) for _ in range(3)]
    assert of(*same).table.shape == (4, 3, 6)
    other = requests(rng, 12, clusters=[i % 6 for i in range(12)])
    assert of(*same, other).table.shape == (4, 4, 12)


def test_many_prompts_are_joined_and_the_interval_stays(monkeypatch):
    processes = [requests(np.random.default_rng(seed), 6000, 1 + seed / 50) for seed in range(3)]
    joined = of(*processes)
    monkeypatch.setattr(crossed, "MOST_CLUSTERS", 10_000)
    whole = of(*processes)
    assert joined.table.shape == (4, 3, 2000) and whole.table.shape == (4, 3, 6000)
    assert joined.intervals(speedup)["speedup"] == pytest.approx(whole.intervals(speedup)["speedup"], rel=2e-3)
    narrow = [TwoWaySums(s.point, s.table[:, :1].repeat(3, 1)).intervals(speedup)["speedup"] for s in (joined, whole)]
    widths = [np.log(high / low) for low, high in narrow]  # of prompts alone
    assert widths[0] == pytest.approx(widths[1], rel=0.1)


@pytest.mark.parametrize(("processes", "prompts"), [(2, 9), (9, 4)])
def test_too_few_processes_or_prompts_have_no_interval(processes, prompts):
    rng = np.random.default_rng(0)
    few = of(*(requests(rng, prompts) for _ in range(processes)))
    assert few.intervals(speedup) == {"speedup": None} and few.estimate("tokens", "seconds").stderr is None
    assert of(*(requests(rng, 5) for _ in range(3))).intervals(speedup)["speedup"] is not None


# The command. One real run; processes are copies of it on machines of other speeds.

OPTIONS = ["drafter=random", "temperature=0", "executor=eager", "logger=none", "max_new_tokens=4", "data.limit=6",
           "gamma=1"]  # fmt: skip
SLOWER = (1.0, 1.2, 1.5)  # the speculative seconds of each process


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """A finished run."""
    folder = tmp_path_factory.mktemp("one") / "run"
    with pytest.MonkeyPatch.context() as patch, steady():
        assert call([*small(*OPTIONS), f"hydra.run.dir={folder}"], patch, folder.parent) == 0
    return folder


class Processes:
    """In place of fresh processes: copies of a run. `ends` says how each ends: an exit code, or an exception."""

    def __init__(self, one):
        self.one, self.ends, self.commands = one, {}, []

    def __call__(self, words):
        self.commands.append(words)
        folder = words[-1].removeprefix("hydra.run.dir='").removesuffix("'")
        number = int(folder.rpartition("=")[2])
        end = self.ends.get(number, 0)
        if isinstance(end, type):
            raise end
        if end == 0:
            shutil.copytree(self.one, folder, dirs_exist_ok=True)
            self.slow_down(folder, SLOWER[number])
        return end

    def slow_down(self, folder, factor):
        path, results = f"{folder}/sums.parquet", f"{folder}/results.json"
        table = parquet.ParquetFile(path).read()  # read_table makes a column of the folder repeat=N
        for name in ("seconds", "draft_seconds", "verify_seconds", "wall_seconds"):
            place = table.column_names.index(name)
            table = table.set_column(place, name, [table[name].to_numpy() * factor])
        parquet.write_table(table, path)
        with open(results) as file:
            result = json.load(file)
        result["identity"]["files"]["sums.parquet"] = contents(Path(path))
        with open(results, "w") as file:
            json.dump(result, file)


@pytest.fixture
def processes(one, monkeypatch):
    found = Processes(one)
    monkeypatch.setattr(repeats, "run_process", found)
    return found


ASKED = [*small(*OPTIONS), "repeats=3"]


def test_the_pooled_result_is_that_of_all_processes(one, processes, monkeypatch, tmp_path, capsys):
    assert call([*ASKED, "hydra.run.dir=D"], monkeypatch, tmp_path) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "process 2 of 3" in shown and "; 3 processes; between processes sd" in shown
    run = load_run(tmp_path / "D")
    alone = load_run(one).result
    result, sums = run.result, load_sums(one).columns
    expected = sums["plain_seconds"].sum() / (sums["seconds"].sum() * np.mean(SLOWER))
    assert result["speedup"]["measured"] == pytest.approx(expected)
    rates = 1 / np.array(SLOWER)
    assert result["repeats"]["sd"]["speedup"] == pytest.approx(np.std(rates, ddof=1) / np.mean(rates))
    low, high = result["speedup"]["ci95"]
    assert low < expected / np.mean(SLOWER) and high > expected * 1.2  # wider than any prompts would make it
    for name in ("tokens", "rounds", "prompts", "verified", "tested"):
        assert result["counts"][name] == 3 * alone["counts"][name]
    for name in ("alpha", "block_efficiency", "alpha_on_target_text"):
        assert result[name]["mean"] == pytest.approx(alone[name]["mean"])
    cost, of_one, acceptance = result["cost"], alone["cost"], result["acceptance"]
    assert cost["target_step_seconds"] == pytest.approx(of_one["target_step_seconds"])
    assert cost["v"] == pytest.approx(of_one["v"] * np.mean(SLOWER))
    assert result["throughput_ci95"]["speculative_tokens_per_second"] is not None
    assert np.prod([entry["factor"] for entry in result["speedup"]["accounting"].values()]) == pytest.approx(expected)
    assert acceptance["lengths"] == [3 * count for count in alone["acceptance"]["lengths"]]
    assert acceptance["check"] == alone["acceptance"]["check"]  # the same draws again are no evidence
    for name in ("conditional", "joint"):
        for own, one_of_three in zip(acceptance[name], alone["acceptance"][name], strict=True):
            assert own["n"] == 3 * one_of_three["n"] and own["mean"] == pytest.approx(one_of_three["mean"])
    assert result["throughput"]["user_tokens_per_second"] > 0 and result["speedup"]["geometric_mean"]["ci95"]
    assert result["status"] == "complete" and result["repeats"]["processes"] == 3
    rows = list(csv.DictReader((tmp_path / "D" / "repeats.csv").open()))
    assert [row["process"] for row in rows] == ["repeat=0", "repeat=1", "repeat=2"]
    assert {*load_sums(tmp_path / "D").processes} == {0, 1, 2} and load_trace(tmp_path / "D").texts
    assert not list(tmp_path.rglob("*.tmp"))
    assert sorted(result) == sorted(alone)  # a whole result


def test_the_logger_gets_the_pooled_results_once(processes, monkeypatch, tmp_path):
    """And its error loses nothing."""
    given = []

    def log_repeats(self, opening, result, rows):
        given.append((opening, result, rows))
        raise OSError("no network")

    monkeypatch.setattr(NoLogger, "log_repeats", log_repeats)
    for _ in range(2):  # the second time all is there
        assert call([*ASKED, "hydra.run.dir=D"], monkeypatch, tmp_path) == 0
    [(opening, result, rows)] = given
    assert (opening.kind, opening.out_dir.name, opening.choices["drafter"]) == ("repeats", "D", "random")
    assert result["repeats"]["processes"] == 3 and [row["process"] for row in rows] == [f"repeat={n}" for n in range(3)]


def test_a_process_gets_the_same_overrides(processes, monkeypatch, tmp_path):
    """Composed as Hydra would, each command is the run that the pool looks for."""
    asked = [*ASKED, "repeats_vary=both", "seed=5", "hydra.run.dir=D"]
    assert call(asked, monkeypatch, tmp_path) == 1  # copies of another seed are not what was asked for
    for number, words in enumerate(processes.commands):
        assert words[:3] == [sys.executable, "-m", "specbench"]
        config = composed(*(word for word in words[7:] if not word.startswith("hydra.run")))
        assert (config.seed, config.order, config.repeats) == (5 + number, number, 1)
        expected = check(composed(*small(*OPTIONS), f"seed={5 + number}", f"order={number}")).identity()
        assert check(config).identity() == expected
    assert len(processes.commands) == 3


def test_what_is_finished_is_not_run_again(processes, monkeypatch, tmp_path, capsys):
    assert call([*ASKED, "repeats=2", "hydra.run.dir=D"], monkeypatch, tmp_path) == 0
    assert load_run(tmp_path / "D").result["speedup"]["ci95"] is None  # of two processes
    shown = capsys.readouterr()
    assert "too few processes or prompts" in shown.out and "repeats=2 gives no interval" in shown.err
    processes.commands.clear()
    assert call([*ASKED, "hydra.run.dir=D"], monkeypatch, tmp_path) == 0
    assert [words[-1][-2] for words in processes.commands] == ["2"]
    shown = capsys.readouterr()
    assert "process 1 of 3: finished before" in shown.out and "gives no interval" not in shown.err
    before = (tmp_path / "D" / "results.json").read_bytes()
    assert call([*ASKED, "hydra.run.dir=D"], monkeypatch, tmp_path) == 0
    shown = capsys.readouterr().out
    assert len(processes.commands) == 1 and "All processes were finished before" in shown and "3 processes" in shown
    assert (tmp_path / "D" / "results.json").read_bytes() == before and not (tmp_path / "D" / "earlier-2").exists()
    assert call([*ASKED, "hydra.run.dir=D", "force=true"], monkeypatch, tmp_path) == 0
    assert len(processes.commands) == 4


def test_a_finished_single_run_is_measured_again_and_says_so_before(one, monkeypatch, tmp_path, capsys):
    measured, told = [], "it is measured again"
    monkeypatch.setattr("specbench.run.execute.execute_one", lambda job, kind, **given: measured.append(kind))
    shutil.copytree(one, tmp_path / "D")
    assert call([*small(*OPTIONS), "hydra.run.dir=D"], monkeypatch, tmp_path) == 0
    assert told in capsys.readouterr().out and measured == ["run"]
    assert call([*small(*OPTIONS), "hydra.run.dir=D", "max_new_tokens=5"], monkeypatch, tmp_path) == 0
    assert told not in capsys.readouterr().out and measured == ["run", "run"]  # another run


@pytest.mark.parametrize("finished", only([2], [0, 2]))
def test_an_interrupt_keeps_what_is_finished(finished, processes, monkeypatch, tmp_path, capsys):
    processes.ends = {finished: KeyboardInterrupt}
    assert call([*ASKED, "hydra.run.dir=D"], monkeypatch, tmp_path) == 130
    err = " ".join(capsys.readouterr().err.split())
    assert f"interrupted: {finished} of 3 processes are finished" in err and "Traceback" not in err
    assert len(processes.commands) == finished + 1
    if finished:
        result = load_run(tmp_path / "D").result
        assert result["status"] == "interrupted" and result["repeats"]["processes"] == 2
    processes.ends = {}
    assert call([*ASKED, "hydra.run.dir=D"], monkeypatch, tmp_path) == 0
    assert len(processes.commands) == finished + 1 + 3 - finished
    assert load_run(tmp_path / "D").result["status"] == "complete"


@pytest.mark.parametrize(("ends", "code", "sentence", "left"), [
    ({1: 1}, 1, "process 2 of 3 failed (exit code 1)", 2),
    ({0: 2}, 2, "process 1 of 3 could not run", 0),
])  # fmt: skip
def test_a_process_that_fails_is_told_and_the_others_count(
    ends, code, sentence, left, processes, monkeypatch, tmp_path, capsys
):
    processes.ends = ends
    assert call([*ASKED, "hydra.run.dir=D"], monkeypatch, tmp_path) == code
    err = " ".join(capsys.readouterr().err.split())
    assert sentence in err and len(processes.commands) == (3 if left else 1)
    if left:
        result = load_run(tmp_path / "D").result
        assert f"{left} of 3 processes are finished" in err and result["status"] == "incomplete"
        assert (result["repeats"]["failed"], result["repeats"]["processes"]) == (3 - left, left)


@pytest.mark.slow
def test_a_sweep_repeats_each_job_and_has_the_pooled_numbers(processes, monkeypatch, tmp_path, capsys):
    """Of a job that shared its cores too: its processes know nothing of other jobs."""
    shared = Placement("submitit_slurm", "h", [0], 1, True, None, 2, ["another job has core 0 too"])
    monkeypatch.setattr(cpu_affinity, "placement", lambda: shared)
    asked = ["-m", *ASKED, "name=s"]
    assert call(asked, monkeypatch, tmp_path) == 0
    (folder,) = (tmp_path / "outputs" / "s").glob("*gamma=1*")
    (row,) = csv.DictReader((tmp_path / "outputs" / "s" / "summary.csv").open())
    result = load_run(folder).result
    assert float(row["speedup"]) == result["speedup"]["measured"] and row["processes"] == "3"
    assert float(row["sd"]) == result["repeats"]["sd"]["speedup"] and len(processes.commands) == 3
    assert result["placement"] == asdict(shared) and result["notes"][-1].startswith("other jobs ran on other cores")
    assert not result["machine"]["steady"] and result["machine"]["reasons"][-1] == shared.shared[0]
    capsys.readouterr()
    assert call(asked, monkeypatch, tmp_path) == 0
    assert len(processes.commands) == 3 and "finished before, skipped" in capsys.readouterr().out


def test_the_verdict_and_the_machine_are_the_worst_ones(processes, monkeypatch, tmp_path):
    plain = processes.slow_down

    def spoiled(folder, factor):
        plain(folder, factor)
        if factor == SLOWER[1]:
            path = Path(folder) / "results.json"
            result = json.loads(path.read_text())
            result["lossless"] |= {"verdict": "failed", "passed": False, "reason": "a stale cache"}
            result["machine"] |= {"steady": False, "reasons": ["a neighbour"], "others": 0.9}
            path.write_text(json.dumps(result))

    processes.slow_down = spoiled
    assert call([*ASKED, "strict=true", "hydra.run.dir=D"], monkeypatch, tmp_path) == 3
    result = load_run(tmp_path / "D").result
    assert not result["machine"]["steady"] and any("process 2: a neighbour" in r for r in result["machine"]["reasons"])
    assert result["machine"]["others"] == 0.9
    verdict = result["lossless"]
    assert verdict["verdict"] == "failed" and verdict["reason"] == "process 2: a stale cache"


def judged(seed, statistic, found, detail):
    """A result with this p-value; what has none, as a draw of probability 0, fails not by chance."""
    if statistic and not detail:
        detail = {"by_chance": statistic}
    lossless = {"method": "martingale", "statistic": statistic, "threshold": 0.005, "verdict": found,
                "passed": found == "passed", "reason": "x", "alpha_own": {"passed": True},
                "detail": {"impossible": 0} | detail}  # fmt: skip
    return {"config": {"seed": seed}, "lossless": lossless}


@pytest.mark.parametrize(("p", "jobs", "code"), [(0.002, 3, 0), (0.002, 1, 3), (0.001, 3, 3)])
def test_a_strict_sweep_corrects_for_its_jobs(p, jobs, code):
    found = [judged(0, p, "failed", {}), *(judged(0, 0.4, "passed", {}) for _ in range(jobs - 1))]
    examined = [(PlannedJob(number, [], Path(), None, True), SimpleNamespace(finished=True, result=result))
                for number, result in enumerate(found)]  # fmt: skip
    assert closing_sentence(SweepJobs(Path(), "", "", {}, []), examined)[1] == code


@pytest.mark.parametrize(("p", "seeds", "detail", "verdict"), [
    (0.002, (0, 1, 2), {}, "passed"),  # .006 of three tests
    (0.001, (0, 1, 2), {}, "failed"),
    (0.002, (0, 0, 0), {}, "failed"),  # the same texts again are one test: the control
    (0.002, (0, 1, 2), {"impossible": 1}, "failed"),
    (0.0, (0, 1, 2), {}, "failed"),  # a fault
])  # fmt: skip
def test_the_worst_of_several_p_values_is_corrected(p, seeds, detail, verdict):
    rest = [judged(seed, 0.4, "passed", detail) for seed in seeds[1:]]
    found = worst_verdict([judged(seeds[0], p, "failed", detail), *rest])
    assert found["verdict"] == verdict and found["passed"] == (verdict == "passed")
    if verdict == "failed":
        assert found["statistic"] == pytest.approx(len({*seeds}) * p)


def test_reasons_of_several_processes_are_one_each():
    def machine(others, *reasons):
        return {"steady": not reasons, "reasons": [*reasons], "others": others, "steal": None}

    several = enumerate([machine(0.01), machine(0.5, "x is 34%", "y"), machine(0.2, "x is 9%")], 1)
    reasons = ["process 2: x is 34% (and 1 more)", "process 2: y"]
    found = worst_machine({f"process {number}": own for number, own in several})
    assert found == {"steady": False, "reasons": reasons, "others": 0.5, "steal": None}
    steady = worst_machine({"process 1": machine(0.01), "process 2": machine(None)})
    assert steady == {"steady": True, "reasons": [], "others": 0.01, "steal": None}


def test_what_varies_is_the_order_or_the_seed_and_never_the_first_process():
    config = composed(*small("repeats=3", "repeats_vary=order", "seed=7"))
    assert check(config).root.of_process(0)["order"] == 0
    assert check(config).root.of_process(2) == {"repeats": 1, "repeats_vary": "none", "order": 2}
    with pytest.raises(ConfigError, match="the last process would have"):
        check(composed(*small("repeats=3", "repeats_vary=seed", f"seed={2**32 - 2}")))
    prompts = [Prompt(str(i), ("x",)) for i in range(20)]
    same, one, two = (in_seeded_order(prompts, order) for order in range(3))
    assert same == prompts != one != two != prompts and {*one} == {*two} == {*prompts}


CHILD = """
import pathlib, signal, sys, time
got = []
signal.signal(signal.SIGTERM, lambda *rest: got.append("TERM"))
signal.signal(signal.SIGINT, lambda *rest: got.append("INT"))
pathlib.Path(sys.argv[1], "ready").touch()
while not got:
    time.sleep(.01)
time.sleep(.1)
pathlib.Path(sys.argv[1], "got").write_text(" ".join(got))
"""
PARENT = """
import signal, sys
from specbench.run.signals import exit_code, handled
from specbench.run.child_command import run_process
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
with handled():
    try:
        run_process([sys.executable, "-c", *sys.argv[1:]])
    except KeyboardInterrupt:
        sys.exit(exit_code())
"""


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_process_once_and_waits_for_it(sent, tmp_path):
    """The signal goes to a process of its own: one that is not handled must not end the tests."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD, str(tmp_path)], stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "ready").exists() and parent.poll() is None:
        time.sleep(0.01)
    parent.send_signal(sent)
    assert parent.wait() == 128 + sent, parent.stderr.read()
    assert (tmp_path / "got").read_text() == "TERM"


@pytest.mark.slow
def test_real_processes(monkeypatch, tmp_path):
    assert call([*ASKED, "repeats_vary=both", "hydra.run.dir='a b/D'"], monkeypatch, tmp_path) == 0
    result = load_run(tmp_path / "a b" / "D").result
    assert result["repeats"]["processes"] == 3 and result["speedup"]["ci95"] is not None
    children = [check(composed(*small(*OPTIONS), f"seed={n}", f"order={n}")).identity() for n in range(3)]
    for number, wanted in enumerate(children):
        assert examine(tmp_path / "a b" / "D" / f"repeat={number}", wanted).finished
