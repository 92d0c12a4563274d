"""A Slurm cluster of one node on this machine, for trying: up, down or status.

python experiments/scale_out/slurm.py up

Needs root, and Debian's packages slurm-wlm and munge. Everything of it is in FOLDER: configuration, state and logs. Its
jobs run as root. There is no accounting and no control group, so nothing binds jobs to cores but specbench itself.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path("/tmp/specbench-slurm")
CONF = FOLDER / "slurm.conf"
KEY = Path("/etc/munge/munge.key")
CONFIGURATION = """\
ClusterName=trial
SlurmctldHost={host}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=requeue_delay=1
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobRequeue=1
ReturnToService=2
KillWait=5
MinJobAge=3600
SlurmctldTimeout=300
SlurmdTimeout=300
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
NodeName={host} CPUs={cores} RealMemory={memory} State=UNKNOWN
PartitionName=trial Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def environment() -> dict[str, str]:
    """In which Slurm's commands find this cluster."""
    return os.environ | {"SLURM_CONF": str(CONF)}


def ask(*words: str, check: bool = False) -> str:
    """What a command says."""
    done = subprocess.run(words, capture_output=True, text=True, env=environment(), check=False, timeout=60)
    if check and done.returncode:
        sys.exit(f"{' '.join(words)} failed: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def processes(name: str) -> list[int]:
    """The processes of this cluster's daemon."""
    path = FOLDER / f"{name}.pid"
    found = [int(path.read_text())] if path.is_file() and path.read_text().strip() else []
    return [number for number in found if Path(f"/proc/{number}/comm").is_file()
            and Path(f"/proc/{number}/comm").read_text().strip() == name]  # fmt: skip


def start(name: str) -> None:
    """Starts a daemon, if it does not run."""
    if not processes(name):
        ask(name, "-f", str(CONF), *(("-N", os.uname().nodename) if name == "slurmd" else ()), check=True)


def up() -> None:
    """Starts the cluster and waits until its node takes jobs."""
    for command in ("slurmctld", "slurmd", "munged", "sbatch"):
        if shutil.which(command) is None:
            sys.exit(f"{command} is not installed: apt-get install slurm-wlm munge")
    if os.getuid():
        sys.exit("root is needed: slurmd starts jobs of any user")
    for name in ("state", "spool"):
        (FOLDER / name).mkdir(parents=True, exist_ok=True)
    page, pages = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0))
    CONF.write_text(CONFIGURATION.format(host=os.uname().nodename, folder=FOLDER, cores=cores,
                                         memory=page * pages // 2**20 * 9 // 10))  # fmt: skip
    if not KEY.is_file():
        ask("mungekey", "--create", "--keyfile", str(KEY), check=True)
    if not ask("pgrep", "-x", "munged").strip():
        Path("/run/munge").mkdir(exist_ok=True)
        shutil.chown("/run/munge", "munge", "munge")
        shutil.chown(KEY, "munge", "munge")
        ask("runuser", "-u", "munge", "--", "munged", check=True)
    start("slurmctld")
    start("slurmd")
    for _ in range(60):
        state = ask("sinfo", "-h", "-o", "%T").strip()
        if state in ("idle", "mixed", "allocated"):
            print(f"{cores} cores: {state}; export SLURM_CONF={CONF}")
            return
        if "down" in state or "drain" in state:
            ask("scontrol", "update", f"NodeName={os.uname().nodename}", "State=RESUME")
        time.sleep(1)
    sys.exit(f"the node does not come up: see {FOLDER}/slurmctld.log and slurmd.log")


def down() -> None:
    """Ends the cluster with its jobs, and removes its folder."""
    if CONF.is_file():
        ask("scancel", "--user=root")
        time.sleep(2)
    for name in ("slurmd", "slurmctld"):
        for number in processes(name):
            os.kill(number, signal.SIGTERM)
            for _ in range(50):
                if not Path(f"/proc/{number}").exists():
                    break
                time.sleep(0.2)
    shutil.rmtree(FOLDER, ignore_errors=True)


if __name__ == "__main__":
    commands = {"up": up, "down": down, "status": lambda: print(ask("sinfo"), ask("squeue"))}
    if len(sys.argv) != 2 or sys.argv[1] not in commands:
        sys.exit(__doc__)
    commands[sys.argv[1]]()
