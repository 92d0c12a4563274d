"""What a run on several workers needs, before anything is loaded."""

import os
import re
import socket
from importlib.util import find_spec

from specbench.config.schema import Root
from specbench.settings import ConfigError
from specbench.visible import first_line, shown

CLUSTER = "RAY_ADDRESS"  # of the environment: a cluster that is there already
SECONDS = 10  # until somebody has to answer there


def refuse_workers(root: Root, device: str) -> None:
    """Raises ConfigError if Ray is not installed, its cluster does not answer, or two workers would share a core
    or a device of this machine. What a cluster has is known when Ray is connected."""
    if root.workers == 1:
        return
    asked = f"workers={root.workers} is not possible"
    if find_spec("ray") is None:
        raise ConfigError(f"{asked} without Ray: pip install -e '.[ray]'")
    if root.device.startswith("cuda:"):
        raise ConfigError(f"{asked} with device={root.device}: each worker needs a device of its own, use device=cuda")
    if address := os.environ.get(CLUSTER):
        refuse_silence(address)
        return
    kind, there = ("core", len(cores())) if device == "cpu" else ("CUDA device", cuda_devices())
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


def cores() -> list[int]:
    """The numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return [*range(os.cpu_count() or 1)]


def cuda_devices() -> int:
    """The number of CUDA devices that this process sees."""
    import torch

    return torch.cuda.device_count()
