"""What a run on several workers needs, before anything is loaded."""

import os
from importlib.util import find_spec

from specbench.config.schema import Root
from specbench.settings import ConfigError

CLUSTER = "RAY_ADDRESS"  # of the environment: a cluster that is there already


def refuse_workers(root: Root, device: str) -> None:
    """Raises ConfigError if Ray is not installed, or two workers would share a core or a device of this machine. Of a
    cluster it is known when it is reached."""
    if root.workers == 1:
        return
    asked = f"workers={root.workers} is not possible"
    if find_spec("ray") is None:
        raise ConfigError(f"{asked} without Ray: pip install -e '.[ray]'")
    if root.device.startswith("cuda:"):
        raise ConfigError(f"{asked} with device={root.device}: each worker needs a device of its own, use device=cuda")
    if os.environ.get(CLUSTER):
        return
    kind, there = ("core", len(cores())) if device == "cpu" else ("CUDA device", cuda_devices())
    if there < root.workers:
        raise ConfigError(
            f"{asked} with {there} {kind}{'s' * (there != 1)}: each worker needs its own, so it must be {there} at most"
        )


def cores() -> list[int]:
    """The numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return [*range(os.cpu_count() or 1)]


def cuda_devices() -> int:
    """The number of CUDA devices that this process sees."""
    import torch

    return torch.cuda.device_count()
