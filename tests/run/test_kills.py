"""Commands that are killed again and again, at random moments, and restarted: nothing that is finished is lost or done
twice, and the results are those of a command that was not killed.

`SPECBENCH_KILLS` is the number of kills of each (default 5); with many, `-o faulthandler_timeout=0` too.
"""

import contextlib
import csv
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_runs import LITTLE

from specbench.results.completion import FILES, contents

KILLS, SEED, JOBS, PROMPTS = int(os.environ.get("SPECBENCH_KILLS", "5")), 3, 6, 6
# Imports everything once, then forks a process for each line that it reads: the import is most of a command's time.
FORKS = """
import os, sys
import specbench.run.command as command
import specbench.contrib.advise.command as advise
import specbench.config.build, specbench.run.run, specbench.run.sweep, specbench.models.pretrained, transformers
import specbench.contrib.advise.driver, specbench.contrib.advise.ways
print("ready", flush=True)
for line in sys.stdin:
    process = os.fork()
    if not process:
        os.dup2(os.open("out.txt", os.O_CREAT | os.O_WRONLY | os.O_TRUNC), 1)
        os.dup2(1, 2)
        which, *words = line.split()
        sys.argv = ["specbench", *words]
        try:
            advise.main(words) if which == "advise" else command.main()
        except SystemExit as stop:
            os._exit(stop.code if isinstance(stop.code, int) else 1)
        finally:
            sys.stdout.flush()
        os._exit(0)
    print(process, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
"""
GAMMAS = [str(gamma) for gamma in range(1, JOBS + 1)]
COMMON = ["name=s", "temperature=0", "executor=eager", "data=jsonl", "data.path=p.jsonl", "max_new_tokens=3",
          "logger=none", "device=cpu"]  # fmt: skip
PAIR = [f"{key}={value}" for key, value in LITTLE.items()]
COMMANDS = {
    "sweep": ["run", "-m", f"gamma={','.join(GAMMAS)}", "drafter=ngram", "data.limit=2", *COMMON],
    "run": ["run", *PAIR, *COMMON],
    "rows": ["run", *PAIR, "batch_size=2", *COMMON],
    "repeats": ["run", *PAIR, "repeats=2", "data.limit=2", *COMMON],
    "workers": ["run", *PAIR, "workers=2", *COMMON],
    "advise": ["advise", "--minutes=0.05", "--only", PAIR[0], "drafter=ngram,bigram", *COMMON],
}


@pytest.fixture
def forks(tmp_path):
    lines = (json.dumps({"prompt": f"def f(x):\n    return {number}"}) for number in range(PROMPTS))
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    call = [sys.executable, "-c", FORKS]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "SPECBENCH_CACHE": str(tmp_path / "cache")}
    with subprocess.Popen(call, stdin=-1, stdout=-1, text=True, cwd=tmp_path, env=environment) as process:
        assert process.stdout.readline() == "ready\n"
        yield process
        process.stdin.close()


def start(forks, words) -> int:
    forks.stdin.write(" ".join(words) + "\n")
    forks.stdin.flush()
    return int(forks.stdout.readline())


def state(folder: Path) -> list[tuple[str, int]]:
    """All files with their sizes."""
    found = []
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # it may be gone meanwhile
            found.append((str(path), path.stat().st_size))
    return sorted(found)


def kill(process: int, folder: Path, chance: random.Random) -> None:
    """Kills a process and those that it has started, some moment after files have changed some times; it may have ended
    before."""
    before, changes, limit = state(folder), chance.randrange(1, 80), time.monotonic() + 120
    while changes and time.monotonic() < limit:
        time.sleep(0.002)
        if not Path(f"/proc/{process}").exists():
            return
        before, after = state(folder), before
        changes -= before != after
    time.sleep(chance.choice((0, chance.uniform(0, 0.2))))
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
        for each in chance.sample([*map(int, children), process], len(children) + 1):
            os.kill(each, signal.SIGKILL)


def finished(folder: Path) -> dict[str, tuple[int, int]]:
    """Where results.json is there everything is there: the file's inode and time by its path."""
    found = {}
    for path in folder.rglob("results.json"):
        result = json.loads(path.read_text())
        assert result["status"] == "complete" or "advise" in path.parts  # which stops ways that cannot win
        if "identity" in result:
            assert result["identity"]["files"] == {name: contents(path.parent / name) for name in FILES}
        found[str(path)] = path.stat().st_ino, path.stat().st_mtime_ns
    return found


def texts(folder: Path) -> dict[str, list[str]]:
    """The texts of every run, by its place."""
    return {
        str(path.relative_to(folder)): [json.loads(line)["output"] for line in path.read_text().splitlines()]
        for path in sorted(folder.rglob("prompts.jsonl"))
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_is_killed_and_restarted_ends_as_one_that_is_not(name, forks, tmp_path):
    outputs, words, chance, before, kills = tmp_path / "outputs", COMMANDS[name], random.Random(SEED), {}, 0
    numbers = itertools.count()
    single = name in ("run", "rows", "workers")
    start(forks, words)
    assert forks.stdout.readline() == "0\n", (tmp_path / "out.txt").read_text()
    whole = texts(outputs)
    while kills < KILLS:
        outputs.rename(tmp_path / f"outputs-{next(numbers)}")
        before, decoded, code = {}, 0, -signal.SIGKILL
        while code and kills < KILLS and not (single and before):  # a single run that is over is measured again
            process = start(forks, words)
            kill(process, outputs, chance)
            code = int(forks.stdout.readline())
            assert code in (0, -signal.SIGKILL), (tmp_path / "out.txt").read_text()
            kills += code != 0
            after = finished(outputs)
            same = {path: after.get(path) for path in before} == before
            # A part of an advice that was killed before it was noted is decoded again, and its results are kept.
            assert same or (name == "advise" and {*before.values()} <= {*after.values()}), f"kill {kills}: done again"
            kept = sum(path.stat().st_size for path in outputs.rglob("groups.part"))  # bytes of what is decoded
            assert not single or not code or after or kept >= decoded, f"kill {kills}: a group is lost"
            before, decoded = after, kept
        if code and not (single and before):
            start(forks, words)
            assert forks.stdout.readline() == "0\n", (tmp_path / "out.txt").read_text()
        after = finished(outputs)
        assert {path: after[path] for path in before} == before or name == "advise"
        assert {*before.values()} <= {*after.values()}
        assert texts(outputs) == whole or name == "advise"  # what is tried depends on times
        assert not list(tmp_path.rglob("*.tmp")) and not list(outputs.rglob("*.part"))
    if name == "sweep":
        rows = list(csv.DictReader((outputs / "s" / "summary.csv").open()))
        assert [row["gamma"] for row in rows] == GAMMAS and all(row["lossless"] != "no result" for row in rows)
