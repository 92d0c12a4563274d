"""What a run on several workers needs, before anything is loaded, and which variables a cluster's processes get."""

import os
import re
import socket
from importlib.util import find_spec

from specbench.contrib.cluster.cpu_affinity import usable, visible_devices
from specbench.errors import ConfigError, first_line, installing, shown
from specbench.run_config import RunConfig

CLUSTER = "RAY_ADDRESS"  # of the environment: a cluster that is there already
SECONDS = 10  # until somebody has to answer there
OWN = "SPECBENCH_"  # begins the names of specbench's own variables
FORWARDED = frozenset({
    "HF_DATASETS_CACHE", "HF_DATASETS_OFFLINE", "HF_ENDPOINT", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE",
    "OMP_NUM_THREADS", "TORCHINDUCTOR_CACHE_DIR", "TRANSFORMERS_OFFLINE", "TRITON_CACHE_DIR",
    "WANDB_BASE_URL", "WANDB_DIR", "WANDB_ENTITY", "WANDB_MODE", "WANDB_PROJECT",
})  # fmt: skip


def on_cluster() -> bool:
    """Whether workers run on a cluster's machines, and not on this one."""
    return bool(os.environ.get(CLUSTER))


def refuse_workers(root: RunConfig, device: str, processes: int = 1) -> None:
    """Raises ConfigError if Ray is not installed, its cluster does not answer, two workers would share a core or a
    device of this machine, or `processes` share a target. What a cluster has is known when Ray is connected."""
    asked = f"workers={root.workers} is not possible"
    if find_spec("ray") is None:
        raise ConfigError(f"{asked} without Ray: {installing('ray')}")
    if processes > 1:
        raise ConfigError(
            f"{asked} with target.tensor_parallel={processes}: a worker is one process, so one of the two must be 1"
        )
    if root.device.startswith("cuda:"):
        raise ConfigError(f"{asked} with device={root.device}: each worker needs a device of its own, use device=cuda")
    if address := os.environ.get(CLUSTER):
        refuse_silence(address)
        return
    kind, there = ("core", len(usable())) if device == "cpu" else ("CUDA device", len(visible_devices()))
    if there < root.workers:
        raise ConfigError(
            f"{asked} with {there} {kind}{'s' * (there != 1)}: each worker needs its own, so it must be {there} at most"
        )


def refuse_silence(address: str) -> None:
    """Raises ConfigError if nobody listens at a cluster's address, for which Ray itself waits minutes. Names such as
    auto are for Ray to look up."""
    found = re.fullmatch(r"(?:ray://)?(.+):(\d{1,5})", address)
    if found is None:
        return
    try:
        socket.create_connection((found[1], int(found[2])), SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"{CLUSTER}={shown(address)} does not answer ({first_line(error)}): start the cluster with "
            f"ray start --head, or unset {CLUSTER}"
        ) from error


def forwarded_env() -> dict[str, str]:
    """Environment variables that a command hands to processes of a cluster which was there before it. The cluster
    stores them and shows them to all who may look at it, so none holds a token."""
    return {name: value for name, value in os.environ.items() if name in FORWARDED or name.startswith(OWN)}
