"""Hydra's launchers: what each needs, which is looked at before a sweep starts, and which cores its jobs have."""

import importlib.util
import os
import re
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbench.contrib.cluster.cpu_affinity import can_pin, usable, visible_devices
from specbench.contrib.cluster.job_list import SERIAL
from specbench.contrib.ray.rules import forwarded_env
from specbench.errors import ConfigError, first_line, installing, shown

LONGEST_ANSWER = 60  # seconds that Slurm has to answer
LONGEST_CONNECTION = 10  # seconds until a Ray cluster's machine answers
LONGEST_JOINING = 30  # seconds until a machine with enough cores has joined it
EVERY_CORE = -1  # n_jobs


@dataclass(frozen=True)
class Launcher:
    """What is known of a launcher: the module and the extra that it needs, and whether its jobs may run on another
    machine."""

    module: str = ""
    extra: str = ""
    elsewhere: bool = False


LAUNCHERS = {
    SERIAL: Launcher(),
    "joblib": Launcher("hydra_plugins.hydra_joblib_launcher", "joblib"),
    "submitit_local": Launcher("hydra_plugins.hydra_submitit_launcher", "slurm"),
    "submitit_slurm": Launcher("hydra_plugins.hydra_submitit_launcher", "slurm", elsewhere=True),
    "ray": Launcher("hydra_plugins.hydra_ray_launcher", "ray", elsewhere=True),
}
UNKNOWN = Launcher(elsewhere=True)  # a launcher of the user's


def launcher_named(name: str) -> Launcher:
    """The launcher of this name."""
    return LAUNCHERS.get(name, UNKNOWN)


def refuse(name: str, settings: Mapping[str, Any], device: str) -> None:
    """Raises ConfigError if jobs cannot be started this way here, or would share cores or a CUDA device. `settings` are
    those of `hydra.launcher`, `device` is the run's."""
    launcher = launcher_named(name)
    try:
        there = not launcher.module or importlib.util.find_spec(launcher.module) is not None
    except ModuleNotFoundError:
        there = False
    if not there:
        raise ConfigError(f"hydra/launcher={name} is not installed: {installing(launcher.extra)}")
    if name == "joblib":
        _refuse_joblib(settings, device)
    elif name == "submitit_local":
        _refuse_local(settings, device)
    elif name == "submitit_slurm":
        _refuse_slurm(settings)
    elif name == "ray":
        _refuse_ray(settings)


def _whole(key: str, value: Any, least: int = 1, also: Sequence[int | None] = ()) -> Any:
    """The value, if it is an integer from `least` on, or one of `also`. Raises ConfigError."""
    fits = isinstance(value, int) and not isinstance(value, bool) and value >= least
    if not fits and value not in also:
        more = "".join(f", or {'null' if other is None else other}" for other in also)
        raise ConfigError(f"hydra.launcher.{key}={shown(value)} is not allowed: it must be an integer >= {least}{more}")
    return value


def _refuse_joblib(settings: Mapping[str, Any], device: str) -> None:
    jobs = _whole("n_jobs", settings.get("n_jobs"), also=(EVERY_CORE,))
    if jobs != 1 and not can_pin():
        raise ConfigError(f"hydra.launcher.n_jobs={jobs} is not possible: this system cannot give jobs cores of their "
                          "own, use n_jobs=1")  # fmt: skip
    if jobs > len(usable()):
        raise ConfigError(
            f"hydra.launcher.n_jobs={jobs} is not possible: jobs would share cores, this machine has {len(usable())} "
            "for them"
        )
    if jobs != 1 and (devices := _devices("n_jobs", jobs, device)) and jobs > len(devices):
        raise ConfigError(
            f"hydra.launcher.n_jobs={jobs} is not possible: jobs would share CUDA devices, {len(devices)} are visible"
        )


def _devices(key: str, value: Any, device: str) -> list[str]:
    """The CUDA devices that jobs are given one of each; none for runs on a CPU. Raises ConfigError if the run names one
    device for all of them."""
    if device.startswith("cuda:"):
        raise ConfigError(
            f"device={device} with hydra.launcher.{key}={value} is not possible: jobs would share the device, use "
            "device=cuda, and each is given one of its own"
        )
    return visible_devices() if device in ("auto", "cuda") else []


def _refuse_copies(settings: Mapping[str, Any]) -> None:
    """Raises ConfigError if submitit would start a job's process more than once."""
    for key in ("nodes", "tasks_per_node"):
        if settings.get(key) not in (None, 1):
            raise ConfigError(
                f"hydra.launcher.{key}={shown(settings[key])} is not allowed: each process would run the whole job, so "
                "it must be 1"
            )


def _refuse_local(settings: Mapping[str, Any], device: str) -> None:
    _refuse_copies(settings)
    cores = _whole("cpus_per_task", settings.get("cpus_per_task"))
    if not can_pin():
        raise ConfigError("hydra/launcher=submitit_local is not possible: this system cannot give jobs cores of their "
                          "own, use hydra/launcher=basic")  # fmt: skip
    if cores > len(usable()):
        raise ConfigError(
            f"hydra.launcher.cpus_per_task={cores} is not possible: this machine has {len(usable())} cores for jobs"
        )
    _devices("cpus_per_task", cores, device)


def _refuse_slurm(settings: Mapping[str, Any]) -> None:
    _refuse_copies(settings)
    _whole("cpus_per_task", settings.get("cpus_per_task"), also=(None,))
    for command in ("sbatch", "srun", "scontrol"):
        if shutil.which(command) is None:
            raise ConfigError(
                f"hydra/launcher=submitit_slurm is not possible here: {command} is not found, so there is no Slurm "
                "cluster; start the sweep where it is, or use hydra/launcher=joblib or submitit_local"
            )
    code, said = _ask(["sbatch", "--test-only", *flags(settings), "--wrap=true"])
    if code:
        partitions = _ask(["sinfo", "--noheader", "--format=%R"])
        names = sorted({*partitions[1].split()}) if not partitions[0] else []
        there = f"; its partitions are {', '.join(names)}" if names else ""
        asked = ", ".join(f"{key}={settings[key]}" for key in FLAGS if settings.get(key) is not None)
        raise ConfigError(f"Slurm would refuse a job of hydra.launcher ({asked}): {_reason(said)}{there}")


FLAGS = (  # settings that decide whether a job is possible
    "partition", "qos", "account", "constraint", "gres", "nodes", "cpus_per_task", "gpus_per_node", "gpus_per_task",
    "mem_gb", "mem_per_cpu", "mem_per_gpu", "timeout_min",
)  # fmt: skip
OPTIONS = {"mem_gb": "mem", "timeout_min": "time"}  # of sbatch, where they have other names


def flags(settings: Mapping[str, Any]) -> list[str]:
    """What the settings ask of sbatch."""
    return [f"--{OPTIONS.get(key, key.replace('_', '-'))}={settings[key]}{'G' * (key == 'mem_gb')}" for key in FLAGS
            if settings.get(key) is not None]  # fmt: skip


def _ask(words: Sequence[str]) -> tuple[int, str]:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=LONGEST_ANSWER, check=False)
        return done.returncode, done.stderr if done.returncode else done.stdout
    except subprocess.TimeoutExpired:
        return 1, f"it has not answered within {LONGEST_ANSWER} s"
    except OSError as error:
        return 1, str(error)


def _reason(said: str) -> str:
    """Slurm's own words, from the last line that has some."""
    lines = [re.sub(r"^(\w+: )?(error: )?", "", line.strip()) for line in said.splitlines() if line.strip()]
    return lines[-1] if lines else "it does not say why"


def _refuse_ray(settings: Mapping[str, Any]) -> None:
    node: Any = settings.get("ray") or {}
    remote, init = node.get("remote") or {}, node.get("init") or {}
    cores = _whole("ray.remote.num_cpus", remote.get("num_cpus"))
    devices = remote.get("num_gpus") or 0
    if devices != int(devices):
        raise ConfigError(f"hydra.launcher.ray.remote.num_gpus={devices} is not allowed: jobs would share a device")
    own = init.get("address") == "local" or (init.get("address") is None and not os.environ.get("RAY_ADDRESS"))
    if own and cores > len(usable()):
        raise ConfigError(
            f"hydra.launcher.ray.remote.num_cpus={cores} is not possible: this machine has {len(usable())} cores, and "
            "hydra.launcher.ray.init.address names no cluster"
        )
    if own:  # it listens on all addresses of this machine, and Ray makes a token for it; this is read by the import
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    import ray

    address = init.get("address")
    try:
        if found := re.fullmatch(r"(?:ray://)?([\w.-]+):(\d+)", str(address)):  # Ray itself would try for minutes
            socket.create_connection((found[1], int(found[2])), LONGEST_CONNECTION).close()
        if not ray.is_initialized():
            ray.init(**init_of_ray(init, own))
    except Exception as error:
        raise ConfigError(
            f"hydra.launcher.ray.init.address={shown(address)} is not possible: no Ray cluster answers "
            f"({first_line(error)})"
        ) from error
    _refuse_small(ray, cores, devices)


def init_of_ray(given: Mapping[str, Any], own: bool) -> dict[str, Any]:
    """The arguments of `ray.init`. Jobs on a cluster that was there before get the command's variables, which jobs of
    an own one inherit."""
    found = {key: value for key, value in given.items() if value is not None}
    if own:
        return found | {"address": "local"}
    environment = found.get("runtime_env") or {}
    variables = forwarded_env() | dict(environment.get("env_vars") or {})
    return found | {"runtime_env": {**environment, "env_vars": variables}}


def _refuse_small(ray: Any, cores: int, devices: float) -> None:
    """Raises ConfigError if no machine of the cluster has what a job asks for."""
    until = time.monotonic() + LONGEST_JOINING
    while True:  # a cluster that has just begun has its head alone
        nodes = [found["Resources"] for found in ray.nodes() if found["Alive"]]
        if any(found.get("CPU", 0) >= cores and found.get("GPU", 0) >= devices for found in nodes):
            return
        if time.monotonic() > until:
            break
        time.sleep(1)
    most = max((int(found.get("CPU", 0)) for found in nodes), default=0)
    asked = f"num_cpus={cores}" + f" and num_gpus={devices}" * bool(devices)
    raise ConfigError(
        f"hydra.launcher.ray.remote.{asked} is not possible: no machine of the cluster has as much, the largest has "
        f"{most} cores"
    )


def cores_of(name: str, settings: Mapping[str, Any]) -> int | None:
    """The cores that each job has for itself; None if nobody knows."""
    if name == "joblib":
        jobs = settings["n_jobs"]
        return max(1, len(usable()) // (len(usable()) if jobs == EVERY_CORE else jobs))
    if name == "submitit_local":
        return int(settings["cpus_per_task"])
    if name == "submitit_slurm":
        return int(os.environ.get("SLURM_CPUS_PER_TASK") or settings.get("cpus_per_task") or 1)
    if name == "ray":
        return int(settings["ray"]["remote"]["num_cpus"])
    return None


def go_on(name: str, folder: Path) -> str:
    """That jobs do not end with the sweep's command, and how to end them; "" if they do."""
    ends = {"submitit_slurm": "scancel with the numbers that squeue --me lists",
            "submitit_local": f"pkill -f {shlex.quote(str(folder.absolute() / '.submitit'))}"}.get(name)  # fmt: skip
    return f"; jobs that have not ended go on, {ends} ends them" if ends else ""


def needs_device(name: str, device: str) -> bool:
    """Whether a job has to take a CUDA device itself: no scheduler has given it one, and its run would use one."""
    given = launcher_named(name).elsewhere and "CUDA_VISIBLE_DEVICES" in os.environ
    return not given and device in ("auto", "cuda") and bool(visible_devices())
