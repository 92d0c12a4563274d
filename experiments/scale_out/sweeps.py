"""One sweep of 12 short jobs: serially, on Slurm and on Ray, while a seeded script kills what runs it.

python experiments/scale_out/sweeps.py serial
python experiments/scale_out/sweeps.py slurm
python experiments/scale_out/sweeps.py ray
python experiments/scale_out/sweeps.py table

The first three leave outputs/scale_out_WAY and a line in sweeps.csv; the last makes sweeps.md of the lines. Each job
has one thread. slurm starts and ends its own cluster (slurm.py), ray its own (ray_cluster.py).
"""

import csv
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import slurm
from common import commit, machine, read_rows, text, to_markdown, write_rows
from ray_cluster import RayCluster, kill
from same_results import facts

HERE = Path(__file__).resolve().parent
SWEEP = ["drafter=stdlib,ngram", "gamma=1,2,4", "temperature=0,1", "data.limit=1", "max_new_tokens=8", "executor=eager",
         "logger=none"]  # fmt: skip
JOBS, SEED, KILLS, TIRED = 12, 5, 8, 420.0  # kills of a way; seconds after which nothing is killed any more
GAPS = (4.0, 9.0)  # seconds between two kills
ONE = {"OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}
LAUNCHERS = {
    "serial": [],
    "slurm": ["hydra/launcher=submitit_slurm", "hydra.launcher.cpus_per_task=1", "hydra.launcher.mem_gb=2"],
    "ray": ["hydra/launcher=ray", "hydra.launcher.ray.remote.max_retries=-1"],
}


def outputs(way: str) -> Path:
    """The folder of a way's sweep."""
    return Path("outputs") / f"scale_out_{way}"


def begin(way: str, environment: dict[str, str], *more: str) -> subprocess.Popen[str]:
    """Starts the sweep's command."""
    words = [sys.executable, "-m", "specbench", "-m", f"name=scale_out_{way}", *SWEEP, *LAUNCHERS[way], *more]
    log = (outputs(way).parent / f"scale_out_{way}.log").open("a")
    return subprocess.Popen(words, env=environment, stdout=log, stderr=log, text=True, start_new_session=True)


class Killer:
    """Kills at random moments, in an order that the seed decides."""

    def __init__(self, seed: int, victims: dict[str, Callable[[random.Random], bool]]):
        """`victims`: by name, what kills one of them and says whether there was one."""
        self.chance, self.victims = random.Random(seed), victims
        every = [*victims] * (KILLS // len(victims) + 1)
        self.chance.shuffle(every)
        self.order = every[:KILLS] + [name for name in victims if name not in every[:KILLS]]
        self.done: Counter[str] = Counter()
        self.begun, self.next = time.monotonic(), time.monotonic() + 12

    def look(self) -> str:
        """Kills if it is time to. Returns what was killed."""
        now = time.monotonic()
        if not self.order or now < self.next or now - self.begun > TIRED:
            return ""
        self.next = now + self.chance.uniform(*GAPS)
        name = self.order[0]
        if not self.victims[name](self.chance):
            return ""
        self.order.pop(0)
        self.done[name] += 1
        print(f"{now - self.begun:6.1f} s: {name}", flush=True)
        return name


def serial() -> dict[str, Any]:
    """The sweep as the other ways' are compared with."""
    begun = time.monotonic()
    if code := begin("serial", os.environ | ONE).wait():
        sys.exit(f"the serial sweep has ended with {code}: see outputs/scale_out_serial.log")
    return {"seconds": time.monotonic() - begun, "commands": 1}


def running() -> list[str]:
    """Slurm's running jobs."""
    return slurm.ask("squeue", "-h", "-t", "running", "-o", "%A").split()


def workers_of_slurm() -> list[int]:
    """Processes that run a job of Slurm's, and not its shells."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"submitit.core._submit" in words and b"python" in words[0]:
            found.append(int(path.parent.name))
    return sorted(found)


def on_slurm() -> dict[str, Any]:
    """The sweep on Slurm: the command is killed once and not started again; its jobs go on without it."""
    slurm.up()
    parent = begin("slurm", slurm.environment() | ONE)
    begun, ended = time.monotonic(), False

    def worker(chance: random.Random) -> bool:
        if found := workers_of_slurm():
            kill(chance.choice(found))
        return bool(found)

    def requeue(chance: random.Random) -> bool:
        if found := running():
            slurm.ask("scontrol", "requeue", chance.choice(found))
        return bool(found)

    def daemon(name: str) -> Callable[[random.Random], bool]:
        def end(chance: random.Random) -> bool:
            for number in slurm.processes(name):
                kill(number)
            time.sleep(chance.uniform(1, 3))
            slurm.start(name)
            return True

        return end

    def command(chance: random.Random) -> bool:
        if not running() or parent.poll() is not None:
            return False
        parent.kill()
        parent.wait()
        return True

    killer = Killer(SEED, {"worker": worker, "requeue": requeue, "slurmctld": daemon("slurmctld"),
                           "slurmd": daemon("slurmd"), "command": command})  # fmt: skip
    try:
        while not ended:
            killer.look()
            time.sleep(0.3)
            queued = slurm.ask("squeue", "-h", "-t", "pending,running,completing,configuring", "-o", "%A")
            up = bool(slurm.ask("sinfo", "-h"))
            ended = up and not queued.strip() and parent.poll() is not None
        seconds, made = time.monotonic() - begun, summary_is_whole("slurm")
        return {"seconds": seconds, "commands": 1, "kills": told(killer.done), "summary_by_last_job": made}
    finally:
        slurm.down()


def on_ray() -> dict[str, Any]:
    """The sweep on two workers of Ray. Ray ends the jobs with the command that has asked for them, so the same command
    is started again after it was killed."""
    cluster = RayCluster()
    begun, commands = time.monotonic(), 1
    address = f"hydra.launcher.ray.init.address={cluster.address}"
    parent = begin("ray", cluster.environment | ONE, address)

    def worker(chance: random.Random) -> bool:
        if found := cluster.jobs():
            kill(chance.choice(found))
        return bool(found)

    def raylet(chance: random.Random) -> bool:
        place = chance.randrange(2)
        found = cluster.workers[place].members("_run_job")
        if found:
            cluster.kill_raylet(place)
        return bool(found)

    def command(chance: random.Random) -> bool:
        if not cluster.jobs():
            return False
        parent.kill()
        parent.wait()
        return True

    killer = Killer(SEED, {"worker": worker, "raylet": raylet, "command": command})
    try:
        while (code := parent.poll()) != 0:
            if code is not None:
                parent = begin("ray", cluster.environment | ONE, address)
                commands += 1
            killer.look()
            time.sleep(0.3)
        seconds = time.monotonic() - begun
        return {"seconds": seconds, "commands": commands, "kills": told(killer.done)}
    finally:
        cluster.down()


def told(kills: Counter[str]) -> str:
    """Kills by name, in words."""
    return ", ".join(f"{count} {name}" for name, count in sorted(kills.items()))


def summary_is_whole(way: str) -> bool:
    """Whether summary.csv has a row with a verdict for each job."""
    path = outputs(way) / "summary.csv"
    if not path.is_file():
        return False
    with path.open(newline="") as file:
        rows = [*csv.DictReader(file)]
    return len(rows) == JOBS and all(row["lossless"] != "no result" for row in rows)


def counted(way: str) -> dict[str, Any]:
    """What the folders say: results, starts of jobs, jobs done twice, and jobs that differ from the serial sweep's."""
    folders = sorted(path.parent for path in outputs(way).glob("*/results.json"))
    logs = [path.read_text() for path in outputs(way).glob("*/run.log")]
    twice = sum(max(0, log.count("][INFO] written to ") - 1) for log in logs)
    earlier = [json.loads(path.read_text())["status"] for path in outputs(way).glob("*/*/results.json")]
    same = [facts(folder) == facts(outputs("serial") / folder.name) for folder in folders]
    return {
        "results": len(folders),
        "starts": sum(log.count("[specbench][INFO] specbench -m ") for log in logs),
        "twice": twice + earlier.count("complete"),
        "same": sum(same),
        "summary": int(summary_is_whole(way)),
    }


def main(way: str) -> None:
    """Runs one way, and writes its line."""
    shutil.rmtree(outputs(way), ignore_errors=True)
    outputs(way).mkdir(parents=True)
    row = {"way": way, "jobs": JOBS, **{"serial": serial, "slurm": on_slurm, "ray": on_ray}[way]()}
    check = [sys.executable, "-m", "specbench.collect", str(outputs(way))]
    row["collect"] = subprocess.run(check, env=os.environ | ONE, check=False, capture_output=True).returncode
    row |= counted(way)
    stored = HERE / "sweeps.csv"
    rows = [old for old in (read_rows(stored) if stored.is_file() else []) if old["way"] != way]
    result = json.loads(next(outputs(way).glob("*/results.json")).read_text())
    row |= {"machine": machine(result["provenance"], result["config"]["dtype"]), "commit": commit(result["provenance"])}
    write_rows(stored, sorted([*rows, row], key=lambda row: ["serial", "slurm", "ray"].index(row["way"])))
    print(row)


def table() -> None:
    """Makes sweeps.md of sweeps.csv."""
    names = {"way": "way", "jobs": "jobs", "results": "results", "seconds": "seconds", "kills": "killed or requeued",
             "commands": "commands", "starts": "starts of jobs", "twice": "done twice", "same": "as serially",
             "summary": "summary of all jobs"}  # fmt: skip
    rows = read_rows(HERE / "sweeps.csv")
    for row in rows:
        row["seconds"] = float(round(row["seconds"]))
        row["summary"] = "yes" if row["summary"] else "no"
    (HERE / "sweeps.md").write_text(to_markdown(rows, {heading: text(name) for name, heading in names.items()}))


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in ("serial", "slurm", "ray", "table"):
        sys.exit(__doc__)
    table() if sys.argv[1] == "table" else main(sys.argv[1])
