"""Sweeps whose jobs run anywhere: the list of jobs, the summary that the last one makes, launchers, and cores."""

import csv
import dataclasses
import importlib.util
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from small_runs import call as typed
from small_runs import composed, small
from sweep_cases import Apart, another_job

from specbench.config.validate import check
from specbench.contrib.cluster import collect, launchers
from specbench.contrib.cluster import cpu_affinity as cores
from specbench.contrib.cluster.job_list import LIST, JobList, NotedIdentity, lists_in, read_list
from specbench.contrib.cluster.preemption import preemption_signal
from specbench.contrib.cluster.sweep import ClusterSweep
from specbench.contrib.ray.rules import FORWARDED
from specbench.errors import ConfigError, IncompleteError
from specbench.results.fingerprint import Identity
from specbench.results.folder_lock import locked
from specbench.results.loggers.base import NoLogger
from specbench.run import signals as interrupts
from specbench.run import sweep_summary as summary
from specbench.run.interleave import InterleavedGroup
from specbench.run.signals import allow_signals, defer_signals
from specbench.run.sweep import Sweep
from specbench.run.sweep_summary import PLACE, PlannedJob, summarise

OPTIONS = ["drafter=random", "temperature=0", "executor=eager", "logger=none", "max_new_tokens=4", "data.limit=1"]
NOTHING = Identity("", {}, {}, {}, {})
several = pytest.mark.skipif(len(cores.usable()) < 2, reason="needs two cores")


def call(arguments, monkeypatch, folder) -> int:
    monkeypatch.setattr(Sweep, "current", None)
    return typed(["-m", *small(*OPTIONS), *arguments], monkeypatch, folder)


def rows_of(folder):
    return list(csv.DictReader((folder / "summary.csv").open()))


# The list of jobs


def a_list(folder, jobs=3, **more) -> JobList:
    planned = [PlannedJob(n, [f"gamma={n + 1}"], folder / f"gamma={n + 1}", NOTHING, False) for n in range(jobs)]
    given = {"name": "s", "launcher": "ray", "logger": {"_target_": "specbench.results.loggers.base.NoLogger"}, **more}
    return JobList(folder, "gamma=1,2", jobs=planned, **given)


def test_jobs_say_that_they_are_over(tmp_path):
    jobs = a_list(tmp_path)
    jobs.write()
    jobs.end(0)
    jobs.end(1, "it failed")
    assert read_list(jobs.place).over() == {0: "", 1: "it failed"} and not jobs.all_over()
    jobs.end(2)
    assert read_list(jobs.place).all_over()
    again = a_list(tmp_path)  # the same command is started again: what ended before does not count
    again.write()
    assert read_list(jobs.place).over() == {} and read_list(jobs.place).id == again.id
    assert again.number_of(tmp_path / "gamma=2") == 1 and again.number_of(tmp_path) is None


def test_the_folder_of_a_sweep_can_be_moved(tmp_path):
    jobs = a_list(tmp_path / "here")
    jobs.write()
    (tmp_path / "here").rename(tmp_path / "there")
    (moved,) = lists_in(tmp_path / "there")
    assert [job.folder for job in moved.jobs] == [tmp_path / "there" / f"gamma={n}" for n in (1, 2, 3)]
    assert moved.command == jobs.command and moved.jobs[1].overrides == ["gamma=2"]


def test_the_last_command_of_a_folder_comes_last(tmp_path):
    for command, started in (("a", "2026-01-02"), ("b", "2026-01-01")):
        dataclasses.replace(a_list(tmp_path), command=command, started=started).write()
    assert [jobs.command for jobs in lists_in(tmp_path)] == ["b", "a"]


def test_what_was_not_known_before_a_run_does_not_differ():
    noted = NotedIdentity("d", {}, {"target.path": "revision main", "data.path": "x"}, {"torch": "2"}, {})
    stored = {"config": "d", "sources": {"target.path": "commit 1", "data.path": "x"}, "code": {"torch": "2"},
              "device": {"device": "a GPU"}}  # fmt: skip
    assert noted.differs_from(stored, {}) == []
    assert Identity(**vars(noted)).differs_from(stored, {}) == ["the contents of target.path", "the device"]
    assert noted.differs_from(stored | {"sources": {"target.path": "commit 1", "data.path": "y"}}, {}) == [
        "the contents of data.path"
    ]
    assert noted.differs_from(stored | {"code": {"torch": "3"}}, {}) == ["the code of torch"]


@pytest.mark.slow
def test_a_lock_is_waited_for(tmp_path):
    begun = time.monotonic()
    with locked(tmp_path), pytest.raises(ConfigError, match="is being written"), locked(tmp_path, 0.6):
        pass
    assert time.monotonic() - begun > 0.5
    lock = locked(tmp_path)
    lock.__enter__()
    threading.Timer(0.2, lock.__exit__, (None, None, None)).start()
    with locked(tmp_path, 20):
        pass


# The summary


@pytest.mark.slow
def test_the_job_that_ends_last_makes_the_summary(apart, monkeypatch, tmp_path, capsys):
    """Before the command itself does; nothing is mirrored twice."""
    mirrored = []
    monkeypatch.setattr(NoLogger, "log_sweep", lambda self, name, rows, folder: mirrored.append((name, len(rows))))
    command = ["name=s", "gamma=1,2", "hydra/launcher=apart"]
    assert call(command, monkeypatch, tmp_path) == 0
    assert Apart.seen == [False, True] and mirrored == [("s", 2)]
    shown = capsys.readouterr().out
    assert "1/2 gamma=1: " in shown and "2/2 gamma=2: " in shown and "2 jobs, written to" in shown
    (first, second) = (json.loads(path.read_text()) for path in sorted(apart.glob("*/results.json")))
    assert first["placement"]["launcher"] == second["placement"]["launcher"] == "apart"
    assert "nothing is known of the cores" in first["machine"]["reasons"][-1] and not first["machine"]["steady"]
    assert first["provenance"]["argv"][0] == "specbench"
    # Again: all is skipped, nothing is new. Where a result is new, it is mirrored.
    (apart / "summary.csv").unlink()
    collect.main([str(apart)])
    assert [row["lossless"] for row in rows_of(apart)] == ["yes", "yes"] and mirrored == [("s", 2)]
    assert call([*command, "force=true"], monkeypatch, tmp_path) == 0 and mirrored == [("s", 2)] * 2


def test_a_job_that_is_queued_again_knows_its_sweep(monkeypatch, tmp_path):
    """It is pickled twice: by the command, and by its own process."""
    monkeypatch.setattr(sys, "argv", ["specbench", "-m", "gamma=1"])
    monkeypatch.chdir(tmp_path)
    sweep = ClusterSweep()
    sweep.list, sweep.launcher = a_list(tmp_path), "submitit_slurm"
    once = pickle.loads(pickle.dumps(sweep))
    monkeypatch.setattr(sys, "argv", ["submitit"])
    twice = pickle.loads(pickle.dumps(once))
    assert vars(once)["place"] == vars(twice)["place"] == tmp_path / ".sweep" / "gamma=1,2"
    assert twice.argv == ["specbench", "-m", "gamma=1"] and (twice.launcher, twice.cwd) == (sweep.launcher, once.cwd)


def test_the_start_of_a_job_is_not_that_of_the_command(apart, monkeypatch, tmp_path):
    monkeypatch.setattr("specbench.run.command._begun", [time.perf_counter() - 1000])
    assert call(["name=s", "gamma=1", "hydra/launcher=apart"], monkeypatch, tmp_path) == 0
    (found,) = apart.glob("*/results.json")
    assert 0 <= json.loads(found.read_text())["seconds"]["start"] < 500


@contextmanager
def submitit(does):
    """A process with submitit's handler, which notes that it was called, and does `does`."""
    called = []

    def handler(number, frame):
        called.append(number)
        does()

    before = signal.signal(signal.SIGUSR2, handler)
    try:
        yield called
    finally:
        signal.signal(signal.SIGUSR2, before)


def sent(number):
    """Calls the handler of a signal: a library that another test has loaded may have taken the signal itself."""
    signal.getsignal(number)(number, None)


def time_is_up():
    raise RuntimeError("timed-out too many times")


def test_the_warning_of_a_time_limit_is_no_error_of_the_device():
    """What decoding catches, and what must not be disturbed while files are written, does not see it."""
    seen = []
    with submitit(time_is_up) as called:
        with (
            pytest.raises(IncompleteError, match="ended by its scheduler: timed-out too many times"),
            preemption_signal(),
        ):
            with defer_signals():
                sent(signal.SIGUSR2)
                seen.append("written")
                with allow_signals():
                    seen.append("decoded")
            seen.append("went on")
        assert seen == ["written"] and called == [signal.SIGUSR2]
        with pytest.raises(KeyboardInterrupt), preemption_signal():
            sent(signal.SIGTERM)
        assert len(called) == 1
        with preemption_signal():
            pass
        assert len(called) == 1
    with submitit(lambda: sys.exit(-1)), pytest.raises(SystemExit), preemption_signal():  # queued again
        sent(signal.SIGUSR2)


@pytest.mark.slow
def test_a_job_that_is_warned_while_it_decodes_counts_as_failed(apart, monkeypatch, tmp_path, capsys):
    """None of its requests does: what was measured before is written."""
    plain = InterleavedGroup.decode_all_ways

    def decode(self, wanted, jobs, number):
        if number:
            sent(signal.SIGUSR2)
        return plain(self, wanted, jobs, number)

    monkeypatch.setattr(InterleavedGroup, "decode_all_ways", decode)
    monkeypatch.setattr(interrupts._state, "installed", False)
    monkeypatch.setattr("specbench.run.command.handled", nullcontext)  # the command's, which is another process
    with submitit(time_is_up) as called:
        assert call(["name=s", "gamma=1", "data.limit=2", "hydra/launcher=apart"], monkeypatch, tmp_path) == 1
    (path,) = apart.glob("*/results.json")
    result = json.loads(path.read_text())
    assert (result["status"], result["counts"]["failed"], len(called)) == ("interrupted", 0, 1)
    (over,) = [read_list(path.parent).over() for path in apart.glob(f".sweep/*/{LIST}")]
    assert over == {0: "ended by its scheduler: timed-out too many times"} and Apart.seen == [True]


def test_the_page_and_the_logger_are_tried_again(apart, monkeypatch, tmp_path):
    """If they failed; `collect` draws the page in any case."""
    does, made = {"page": False, "logger": False}, []
    monkeypatch.setattr(summary, "draw_page", lambda jobs, folders: made.append("page") or does["page"])
    monkeypatch.setattr(summary, "log_table", lambda jobs, rows: made.append("logger") or does["logger"])
    found = SimpleNamespace(finished=True, result={"provenance": {"started": "now"}, "lossless": {}})
    monkeypatch.setattr("specbench.results.completion.examine", lambda folder, identity: found)
    monkeypatch.setattr(summary, "multirun_rows", lambda jobs: [{"gamma": 1}])
    jobs = a_list(tmp_path, jobs=1)
    jobs.write()

    def made_by(**given):
        made.clear()
        summarise(jobs, printed=False, **given)
        return [*made]

    assert made_by() == ["page", "logger"]
    does["logger"] = True
    assert made_by() == ["page", "logger"]
    assert made_by() == ["page"]
    does["page"] = True
    assert made_by() == ["page"] and made_by() == []
    assert made_by(redraw=True) == ["page"]
    found.result = {"provenance": {"started": "later"}, "lossless": {}}
    assert made_by(page=False) == ["logger"] and made_by() == ["page"]


def test_a_summary_waits_for_that_of_another_command_of_the_folder(tmp_path, monkeypatch):
    """And leaves alone what a command is just writing: its list."""
    monkeypatch.setattr(summary, "WAIT", 0.0)
    jobs, other = a_list(tmp_path), dataclasses.replace(a_list(tmp_path), command="gamma=3")
    for one in (jobs, other):
        one.write()
    writing = jobs.place / f"{LIST}.1.tmp"
    writing.write_text("{")
    summarise(jobs, printed=False)
    assert writing.exists()

    def summarise_the_other(rows):
        with pytest.raises(ConfigError, match="is being written"):
            summarise(other, printed=False)
        return ""

    monkeypatch.setattr(summary, "to_csv", summarise_the_other)
    summarise(jobs, printed=False)


@pytest.mark.slow
def test_a_launcher_that_dies_leaves_a_summary_and_a_sentence(apart, monkeypatch, tmp_path, capsys):
    Apart.dies = True
    assert call(["name=s", "gamma=1,2", "hydra/launcher=apart"], monkeypatch, tmp_path) == 1
    err = capsys.readouterr().err.splitlines()[-1]
    assert "hydra/launcher=apart ended early (RuntimeError: the worker is gone): 1 of 2 jobs have no result" in err
    assert "1 of them have not ended; the same command goes on" in err
    assert [row["lossless"] for row in rows_of(apart)] == ["yes", "no result"]
    with pytest.raises(SystemExit) as ended:
        collect.main([str(apart)])
    assert ended.value.code == 1


def test_collect_wants_the_folder_of_a_sweep(tmp_path, capsys):
    for folder, words in ((tmp_path, "is not the folder of a sweep"), (tmp_path / "nope", "is no folder")):
        with pytest.raises(SystemExit) as ended:
            collect.main([str(folder)])
        assert ended.value.code == 2 and words in capsys.readouterr().err
    a_list(tmp_path).write()
    (tmp_path / ".sweep" / "gamma=1,2" / LIST).write_text("{")
    with pytest.raises(SystemExit) as ended:
        collect.main([str(tmp_path)])
    assert ended.value.code == 2 and "cannot be used" in capsys.readouterr().err


@pytest.mark.slow
def test_another_process_that_makes_the_summary_is_waited_for(tmp_path, monkeypatch):
    jobs = a_list(tmp_path)
    jobs.write()
    lock = locked(jobs.folder / PLACE)
    lock.__enter__()
    threading.Timer(0.2, lock.__exit__, (None, None, None)).start()
    assert summarise(jobs, printed=False) == (
        "3 of 3 jobs have no result, see their run.log; 3 of them have not ended",
        1,
    )


def test_jobs_of_another_machine_are_not_refused_for_its_device():
    config = composed(*small(*OPTIONS, "device=cuda:7"))
    with pytest.raises(ConfigError, match="device=cuda:7 is not here"):
        check(config)
    assert check(config, here=False).identity(here=False).device == {}
    with pytest.raises(ConfigError, match="device=tpu is not allowed"):
        check(composed(*small(*OPTIONS, "device=tpu")), here=False)


# Launchers

JOBLIB = {"n_jobs": 2}
SLURM = {"cpus_per_task": 1, "partition": "nope", "mem_gb": 2}
FAKE = {"sbatch": 'echo "sbatch: error: x" >&2; echo "allocation failure: Invalid partition name" >&2; exit 1',
        "srun": "exit 0", "scontrol": "exit 0", "sinfo": "echo gpu; echo cpu; echo cpu"}  # fmt: skip


def ray(cpus=1, **init):
    return {"ray": {"init": {"address": None, **init}, "remote": {"num_cpus": cpus, "num_gpus": 0}}}


REFUSED = {
    "joblib n_jobs=0": ({"n_jobs": 0}, "hydra.launcher.n_jobs=0 is not allowed: it must be an integer >= 1, or -1"),
    "joblib n_jobs=x": ({"n_jobs": "x"}, "hydra.launcher.n_jobs=x is not allowed"),
    "joblib n_jobs=99999": ({"n_jobs": 99999}, "jobs would share cores, this machine has"),
    "submitit_local cpus_per_task=null": ({"cpus_per_task": None}, "hydra.launcher.cpus_per_task=null is not allowed"),
    "submitit_local cpus_per_task=99999": ({"cpus_per_task": 99999}, "cores for jobs"),
    "submitit_slurm cpus_per_task=0": ({"cpus_per_task": 0}, "must be an integer >= 1, or null"),
    "submitit_slurm": (SLURM, "sbatch is not found, so there is no Slurm cluster"),
    "submitit_slurm nodes=2": (SLURM | {"nodes": 2}, "hydra.launcher.nodes=2 is not allowed"),
    "submitit_local tasks_per_node=2": ({"tasks_per_node": 2}, "hydra.launcher.tasks_per_node=2 is not allowed"),
    "ray num_cpus=0.5": (ray(0.5), "hydra.launcher.ray.remote.num_cpus=0.5 is not allowed"),
    "ray num_cpus=99999": (ray(99999), "hydra.launcher.ray.init.address names no cluster"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_launcher_cannot_do_is_a_sentence(what, monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setenv("PATH", str(tmp_path))
    settings, words = REFUSED[what]
    with pytest.raises(ConfigError) as refused:
        launchers.refuse(what.split()[0], settings, "cpu")
    assert words in str(refused.value)


@pytest.mark.slow
def test_a_launcher_that_is_not_installed_is_a_sentence(monkeypatch, tmp_path, capsys):
    plain = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if "launcher" in name else plain(name, *rest)
    )
    assert call(["name=s", "gamma=1,2", "hydra/launcher=ray"], monkeypatch, tmp_path) == 2
    told = "hydra/launcher=ray is not installed: pip install 'speculative-decoding-bench[ray]'"
    assert told in capsys.readouterr().err and not (tmp_path / "outputs" / "s").exists()


def test_what_slurm_refuses_is_told_in_its_words(monkeypatch, tmp_path):
    for name, script in FAKE.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(ConfigError) as refused:
        launchers.refuse("submitit_slurm", SLURM, "cuda")
    assert str(refused.value) == ("Slurm would refuse a job of hydra.launcher (partition=nope, cpus_per_task=1, "
                                  "mem_gb=2): allocation failure: Invalid partition name; its partitions are "
                                  "cpu, gpu")  # fmt: skip
    (tmp_path / "sbatch").write_text("#!/bin/sh\nexit 0\n")
    launchers.refuse("submitit_slurm", SLURM, "cuda")
    assert launchers.flags(SLURM) == ["--partition=nope", "--cpus-per-task=1", "--mem=2G"]


ENDED = {  # how the job's process ended, and in which state its job is then: whether it is queued again
    "killed": ("kill -9 $$", "RUNNING", 0, True),
    "crashed": ("kill -11 $$", "RUNNING", 0, True),
    "killed a fourth time": ("kill -9 $$", "RUNNING", 3, False),
    "killed after its time": ("kill -9 $$", "TIMEOUT", 0, False),
    "cancelled": ("kill -9 $$", "CANCELLED", 0, False),
    "queued by submitit": ("exit 255", "RUNNING", 0, False),
    "interrupted": ("kill -2 $$", "RUNNING", 0, False),
    "failed": ("exit 1", "RUNNING", 0, False),
    "ended": ("exit 0", "RUNNING", 0, False),
}


@pytest.mark.parametrize("what", ENDED)
def test_slurm_queues_a_job_again_that_was_killed(what, monkeypatch, tmp_path):
    """And no other one."""
    ending, state, restarts, again = ENDED[what]
    told = f'case $1 in show) echo "   JobState={state} Reason=None";; *) echo "$@" >> {tmp_path}/asked;; esac'
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\n{told}\n")
    (tmp_path / "scontrol").chmod(0o755)
    setup = composed(*small(*OPTIONS, "hydra/launcher=submitit_slurm")).hydra.launcher.setup
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    environment |= {"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}
    script = "\n".join([*setup, f"sh -c '{ending}'", ""])
    subprocess.run(["bash", "-c", script], env=environment, capture_output=True, check=False)
    asked = tmp_path / "asked"
    assert (asked.read_text() if asked.exists() else "") == ("requeue 7\n" if again else "")


def test_what_ray_is_started_with(monkeypatch):
    """A cluster of the sweep's own is no other that runs here. One that ran before gets the command's variables, and no
    token."""
    for name in [name for name in os.environ if name.startswith("SPECBENCH_") or name in FORWARDED]:
        monkeypatch.delenv(name)
    for name, value in {"HF_HOME": "/h", "HF_TOKEN": "t", "WANDB_API_KEY": "k", "SPECBENCH_LOCKS": "/l"}.items():
        monkeypatch.setenv(name, value)
    conf = composed(*small(*OPTIONS, "hydra/launcher=ray")).hydra.launcher.ray.init
    given = {**conf, "runtime_env": {"env_vars": {"A": "b"}}}
    own = launchers.init_of_ray(given, own=True)
    assert own["address"] == "local" and own["include_dashboard"] is False
    assert own["runtime_env"] == {"env_vars": {"A": "b"}}  # its jobs inherit the others
    there = launchers.init_of_ray(given | {"address": "h:1"}, own=False)
    assert there["address"] == "h:1"
    assert there["runtime_env"] == {"env_vars": {"A": "b", "HF_HOME": "/h", "SPECBENCH_LOCKS": "/l"}}


def test_a_ray_cluster_of_the_sweeps_own_wants_a_token(monkeypatch):
    """Which Ray reads when it is imported; that of others is as it is."""
    seen = []

    class Ray(ModuleType):
        def is_initialized(self):
            seen.append(os.environ.get("RAY_AUTH_MODE"))
            return True

        def nodes(self):
            return [{"Alive": True, "Resources": {"CPU": 1}}]

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "ray", Ray("ray"))
    for address, variable in ((None, None), ("local", "h:1"), (None, "h:1"), ("auto", None)):
        monkeypatch.setenv("RAY_AUTH_MODE", "")  # so that it is as before afterwards
        monkeypatch.delenv("RAY_AUTH_MODE")
        monkeypatch.setenv("RAY_ADDRESS", variable or "")
        launchers.refuse("ray", ray(address=address), "cpu")
    assert seen == ["token", "token", None, None]


def test_a_command_that_is_interrupted_says_that_jobs_go_on():
    assert "squeue --me" in launchers.go_on("submitit_slurm", Path("a b"))
    assert "pkill -f '/a b/.submitit'" in launchers.go_on("submitit_local", Path("/a b"))
    assert launchers.go_on("ray", Path("s")) == launchers.go_on("joblib", Path("s")) == ""


@several
def test_jobs_do_not_share_a_cuda_device(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(launchers, "visible_devices", lambda: ["0"])
    with pytest.raises(ConfigError, match="jobs would share CUDA devices, 1 are visible"):
        launchers.refuse("joblib", JOBLIB, "auto")
    with pytest.raises(ConfigError, match=r"device=cuda:1 with hydra\.launcher\.n_jobs=2 is not possible"):
        launchers.refuse("joblib", JOBLIB, "cuda:1")
    launchers.refuse("joblib", JOBLIB, "cpu")
    monkeypatch.setattr(launchers, "visible_devices", lambda: ["0", "1"])
    launchers.refuse("joblib", JOBLIB, "cuda")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert launchers.needs_device("ray", "auto") and not launchers.needs_device("ray", "cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")  # Ray has given it one
    assert not launchers.needs_device("ray", "auto") and launchers.needs_device("joblib", "auto")


def test_the_cores_of_a_job(monkeypatch):
    monkeypatch.setattr(launchers, "usable", lambda: list(range(8)))
    assert [launchers.cores_of("joblib", {"n_jobs": jobs}) for jobs in (1, 2, 3, 8, -1)] == [8, 4, 2, 1, 1]
    assert launchers.cores_of("submitit_slurm", {"cpus_per_task": 3}) == 3
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "5")
    assert launchers.cores_of("submitit_slurm", {"cpus_per_task": 3}) == 5
    assert launchers.cores_of("ray", ray(2)) == 2 and launchers.cores_of("mine", {}) is None


@pytest.mark.parametrize("name", [name for name in launchers.LAUNCHERS if name != launchers.SERIAL])
def test_every_launcher_has_a_configuration(name):
    """That its package, where it is installed, accepts."""
    config = composed(*small(*OPTIONS, f"hydra/launcher={name}"))
    assert config.hydra.launcher._target_.startswith(launchers.LAUNCHERS[name].module)
    assert launchers.cores_of(name, config.hydra.launcher) >= 1


# Cores


@several
def test_a_job_has_cores_of_its_own(locks, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    first, second, *_ = total = cores.usable()
    threads = torch.get_num_threads()
    affinity = {}
    with another_job(locks, f"core-{first}"), cores.pin_cores("joblib", 1):
        found = cores.placement()
        assert (found.cores, found.beside, found.pinned, found.shared) == ([second], 1, True, [])
        assert cores.usable() == [second] and torch.get_num_threads() == 1 and os.environ["OMP_NUM_THREADS"] == "1"
        affinity = {int(path.name): os.sched_getaffinity(int(path.name)) for path in Path("/proc/self/task").iterdir()}
        assert set(map(frozenset, affinity.values())) == {frozenset({second})}  # every thread
    assert cores.usable() == total and torch.get_num_threads() == threads and "OMP_NUM_THREADS" not in os.environ
    assert cores.placement() is None
    with cores.pin_cores("joblib", 1):
        assert cores.placement().beside == 0


@several
def test_a_job_waits_for_cores(locks):
    told, total = [], cores.usable()
    other = another_job(locks, f"core-{total[0]}")
    other.__enter__()
    threading.Timer(0.1, other.__exit__, (None, None, None)).start()
    with cores.pin_cores("joblib", len(total), told=told.append):
        assert cores.placement().cores == total
    assert told == [f"waits for {len(total)} of {len(total)} cores: other jobs on this machine have all but "
                    f"{len(total) - 1}"]  # fmt: skip
    with pytest.raises(ConfigError, match="a job of 100000 cores is not possible"), cores.pin_cores("joblib", 100000):
        pass


@several
def test_a_job_whose_scheduler_gave_it_a_core_of_anothers_is_marked(locks, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    total = cores.usable()
    try:
        os.sched_setaffinity(0, total[:1])
        with another_job(locks, f"core-{total[0]}"), cores.pin_cores("submitit_slurm", 1):
            assert cores.placement().shared == [f"another job has core {total[0]} too"]
        with cores.pin_cores("submitit_slurm", 1):
            assert cores.placement().shared == []
    finally:
        os.sched_setaffinity(0, total)


@several
@pytest.mark.parametrize("launcher, slurm", [("submitit_local", "1"), ("submitit_slurm", ""), ("joblib", "")])
def test_a_job_waits_for_the_cores_of_a_container_too(launcher, slurm, locks, monkeypatch):
    """Where all jobs are confined to as many cores as one of them asks for."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    if slurm:  # a shell in an allocation
        monkeypatch.setenv("SLURM_JOB_ID", slurm)
    total, told = cores.usable(), []
    try:
        os.sched_setaffinity(0, total[:1])
        other = another_job(locks, f"core-{total[0]}")
        other.__enter__()
        threading.Timer(0.05, other.__exit__, (None, None, None)).start()
        with cores.pin_cores(launcher, 1, told=told.append):
            assert cores.placement().shared == [] and len(told) == 1
    finally:
        os.sched_setaffinity(0, total)


PLANTED = {
    "symlink": lambda lock, theirs: lock.symlink_to(theirs),
    "hard link": lambda lock, theirs: lock.hardlink_to(theirs),
    "text": lambda lock, theirs: lock.write_text("no number of a process"),
    "pipe": lambda lock, theirs: os.mkfifo(lock),
    "folder": lambda lock, theirs: lock.mkdir(),
}


@pytest.mark.parametrize("what", PLANTED)
def test_a_lock_that_is_none_is_refused_and_not_written(what, locks, tmp_path):
    (tmp_path / "theirs").write_text("12")
    first = locks / f"core-{cores.usable()[0]}"
    PLANTED[what](first, tmp_path / "theirs")
    before = first.read_text() if what == "text" else ""
    with pytest.raises(ConfigError, match=f"{first.name} cannot be used"), cores.pin_cores("joblib", 1):
        pass
    assert (tmp_path / "theirs").read_text() == "12" and (what != "text" or first.read_text() == before)


def test_a_folder_of_locks_whose_files_others_could_replace_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECBENCH_LOCKS", str(tmp_path / "locks"))
    assert cores.locks().stat().st_mode & 0o7777 == 0o1777  # as it is made
    cores.locks().chmod(0o700)
    assert cores.locks() == tmp_path / "locks"
    cores.locks().chmod(0o777)
    with pytest.raises(ConfigError, match="one with the sticky bit"):
        cores.locks()
    (tmp_path / "locks").chmod(0o755)
    if os.getuid():
        monkeypatch.setattr(os, "getuid", lambda: 12345)
    else:
        os.chown(tmp_path / "locks", 12345, -1)
    with pytest.raises(ConfigError, match="a folder of yours"):
        cores.locks()


def test_cores_that_are_free_as_a_whole_come_first():
    pairs = {core: frozenset((core % 4, core % 4 + 4)) for core in range(8)}.__getitem__
    assert cores.chosen(range(8), 2, pairs) == [0, 4]
    assert cores.chosen([1, 2, 4, 6], 2, pairs) == [2, 6]
    assert cores.chosen([4, 1], 1, pairs) == [4] and cores.chosen([3], 2, pairs) == [3]


@pytest.mark.parametrize("text", ["0,4", "0-1", "3"])
def test_hardware_threads_of_a_core(text, tmp_path):
    (tmp_path / "cpu0" / "topology").mkdir(parents=True)
    (tmp_path / "cpu0" / "topology" / "thread_siblings_list").write_text(f"{text}\n")
    assert cores.thread_siblings(0, tmp_path) == {"0,4": {0, 4}, "0-1": {0, 1}, "3": {3}}[text]
    assert cores.thread_siblings(1, tmp_path) == {1}


@pytest.mark.parametrize(
    "named, devices", [("0,1", ["0", "1"]), ("1,-1,0", ["1"]), ("-1", []), ("NoDevFiles", []), ("", [])]
)
def test_the_devices_that_cuda_shows(named, devices, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert cores.visible_devices() == devices


@several
def test_a_process_stays_with_its_cuda_device(locks, monkeypatch):
    monkeypatch.setattr(cores._state, "device", "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    told = []
    with another_job(locks, "cuda-3"), cores.pin_cores("joblib", 1, device=True):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == cores.placement().devices == "5"
    other = another_job(locks, "cuda-5")
    other.__enter__()
    threading.Timer(0.1, other.__exit__, (None, None, None)).start()
    with cores.pin_cores("joblib", 1, device=True, told=told.append):  # CUDA reads the variable once
        assert cores.placement().devices == "5" and told == ["waits for one of 1 CUDA devices: other jobs on this "
                                                             "machine have them"]  # fmt: skip


# The real launchers

REAL = {
    "ray": ["hydra.launcher.ray.init.num_cpus=1"],
    "joblib": ["hydra.launcher.n_jobs=2"],  # one job at a time would run in the command's own process
    "submitit_local": ["hydra.launcher.cpus_per_task=1"],
    "submitit_slurm": ["hydra.launcher.cpus_per_task=1", "hydra.launcher.mem_gb=2"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_a_sweep_on_the_real_launcher(name, monkeypatch, tmp_path):
    """In processes of the launcher's. Skips where it is not installed, or has no cluster."""
    try:
        there = importlib.util.find_spec(launchers.LAUNCHERS[name].module)
    except ModuleNotFoundError:
        there = None
    if not there or (name == "submitit_slurm" and not shutil.which("sbatch")):
        pytest.skip(f"hydra/launcher={name} is not installed")
    words = [sys.executable, "-m", "specbench", "-m", *small(*OPTIONS), "name=s", "gamma=1,2", f"hydra/launcher={name}"]
    environment = os.environ | {"SPECBENCH_LOCKS": str(tmp_path / "locks"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*words, *REAL[name]], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280
    )
    if name == "submitit_slurm" and "Slurm would refuse" in done.stderr:
        pytest.skip("no Slurm cluster answers")
    assert done.returncode == 0, done.stderr
    sweep = tmp_path / "outputs" / "s"
    assert [(row["gamma"], row["lossless"]) for row in rows_of(sweep)] == [("1", "yes"), ("2", "yes")]
    for path in sweep.glob("*/results.json"):
        found = json.loads(path.read_text())["placement"]
        assert found["launcher"] == name and found["pinned"] and not found["shared"] and found["cores"]
    logs = [path.read_text() for path in sweep.glob("*/run.log")]
    assert sum(log.count("the last job of the sweep") for log in logs) == 1  # and it was not the command
