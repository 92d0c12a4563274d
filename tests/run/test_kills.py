"""A sweep that is killed again and again and restarted with the same command ends complete."""

import contextlib
import csv
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from specbench.results.completion import FILES, contents

JOBS, KILLS, SEED = 6, 5, 3
# Imports everything once, then forks a process for each line that it reads: the import is most of a command's time.
FORKS = """
import os, sys
import specbench.run.command as command
import specbench.config.build, specbench.run.run, specbench.run.sweep, specbench.models.pretrained, transformers
print("ready", flush=True)
for line in sys.stdin:
    process = os.fork()
    if not process:
        os.dup2(os.open("out.txt", os.O_CREAT | os.O_WRONLY | os.O_TRUNC), 1)
        os.dup2(1, 2)
        sys.argv = ["specbench", *line.split()]
        try:
            command.main()
        except SystemExit as stop:
            os._exit(stop.code if isinstance(stop.code, int) else 1)
        finally:
            sys.stdout.flush()
        os._exit(0)
    print(process, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
"""
GAMMAS = [str(gamma) for gamma in range(1, JOBS + 1)]
COMMAND = ["-m", "name=s", f"gamma={','.join(GAMMAS)}", "drafter=ngram", "temperature=0", "executor=eager",
           "data=jsonl", "data.path=p.jsonl", "max_new_tokens=3", "logger=none", "device=cpu"]  # fmt: skip


@pytest.fixture
def forks(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "def f(x):"}\n')
    call = [sys.executable, "-c", FORKS]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(call, stdin=-1, stdout=-1, text=True, cwd=tmp_path, env=environment) as process:
        assert process.stdout.readline() == "ready\n"
        yield process
        process.stdin.close()


def start(forks) -> int:
    forks.stdin.write(" ".join(COMMAND) + "\n")
    forks.stdin.flush()
    return int(forks.stdout.readline())


def finished(sweep: Path) -> dict[str, tuple[int, int]]:
    """Where results.json is there everything is there: the file's inode and time by job."""
    found = {}
    for path in sweep.glob("*/results.json"):
        result = json.loads(path.read_text())
        assert result["status"] == "complete"
        assert result["identity"]["files"] == {name: contents(path.parent / name) for name in FILES}
        found[path.parent.name] = path.stat().st_ino, path.stat().st_mtime_ns
    return found


@pytest.mark.slow
def test_a_sweep_that_is_killed_and_restarted_ends_complete(forks, tmp_path):
    sweep, chance, before, places = tmp_path / "outputs" / "s", random.Random(SEED), {}, set()
    for kill in range(KILLS):
        process = start(forks)
        # The moment is random, after another file of a run has appeared than before the last kills.
        awaited = chance.choice(("config.yaml", "prompts.jsonl.part", "prompts.jsonl", "results.json"))
        count, limit = len(list(sweep.glob(f"*/{awaited}"))), time.monotonic() + 20
        while len(list(sweep.glob(f"*/{awaited}"))) <= count and time.monotonic() < limit:
            time.sleep(0.004)
        time.sleep(chance.choice((0, chance.uniform(0, 0.3))))
        with contextlib.suppress(ProcessLookupError):  # it may have ended
            os.kill(process, signal.SIGKILL)
        code = int(forks.stdout.readline())
        places.add(code)
        after = finished(sweep)
        assert {name: after.get(name) for name in before} == before, f"kill {kill}: a finished job was done again"
        before = after
    assert places == {-signal.SIGKILL} and len(before) < JOBS
    start(forks)
    assert forks.stdout.readline() == "0\n", (tmp_path / "out.txt").read_text()
    after = finished(sweep)
    assert len(after) == JOBS and {name: after[name] for name in before} == before
    rows = list(csv.DictReader((sweep / "summary.csv").open()))
    assert [row["gamma"] for row in rows] == GAMMAS and all(row["lossless"] != "no result" for row in rows)
    assert not list(tmp_path.rglob("*.tmp")) and not list(tmp_path.rglob("*.part"))
