"""Workers as Ray actors. What `Team` needs of them is `Pool`, so that it can be tested without a cluster."""

import logging
import math
import os
import secrets
import sys
from collections.abc import Sequence
from typing import Any, Protocol

from specbench.contrib.cluster.cpu_affinity import usable
from specbench.contrib.ray.rules import CLUSTER, forwarded_env
from specbench.contrib.ray.worker import Worker
from specbench.errors import ConfigError, first_line
from specbench.run.signals import restored

log = logging.getLogger(__name__)
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


class DiedError(Exception):
    """A worker's process has ended."""


class Pool(Protocol):
    """Starts workers and calls them. Calls of one worker follow each other."""

    cores: int  # of each worker; 0: they have a device

    def start(self, number: int) -> Any:
        """A worker, which may not be there yet."""

    def call(self, worker: Any, method: str, *arguments: Any) -> Any:
        """Begins a call of one of `Worker`'s methods."""

    def wait(self, calls: Sequence[Any], seconds: float) -> Sequence[Any]:
        """Those of the calls that are over, after so many seconds at most."""

    def result(self, call: Any) -> Any:
        """What a call returned. Raises what it raised, or DiedError."""

    def end(self, worker: Any) -> None:
        """Ends a worker that does not answer, if it is still there."""


class RayPool:
    """Ray actors, in the cluster that RAY_ADDRESS names or in one that is made for this run."""

    def __init__(self, workers: int, device: str, auto: bool = False):
        """`auto` says whether the device is what this machine has. Raises ConfigError if there is no such cluster, if
        it is too small, or if it has GPUs and this machine has none."""
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        if not os.environ.get(CLUSTER) and "ray" not in sys.modules:  # which reads them once
            answer_nobody()
        import ray

        self.ray, self.own = ray, not ray.is_initialized()
        if self.own:
            with restored():  # Ray sets a handler of its own
                _connect(ray, device)
        self.started: list[Any] = []
        try:
            self.cores, options = self._share(workers, device, auto)
        except ConfigError:
            self.close()
            raise
        self.actor = ray.remote(Worker).options(**options, max_restarts=0, max_task_retries=0)

    def _share(self, workers: int, device: str, auto: bool) -> tuple[int, dict[str, Any]]:
        """The cores of each worker, and what Ray is asked for it."""
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        there = sum(int(node.get("GPU", 0)) for node in nodes)
        if auto and there and device == "cpu" and not self.own:
            raise ConfigError(
                f"device=auto is not possible with {CLUSTER}: this machine has no CUDA device, and its cluster has "
                f"{there}; choose device=cuda or device=cpu"
            )
        if device == "cuda":
            _refuse(workers, there, "GPU")
            return 0, {"num_cpus": 1, "num_gpus": 1}
        each = most_each([int(node.get("CPU", 0)) for node in nodes], workers)
        _refuse(workers, sum(int(node.get("CPU", 0)) for node in nodes), "core")
        if wanted := os.environ.get("OMP_NUM_THREADS", ""):
            each = min(each, int(wanted)) if wanted.isdecimal() and int(wanted) else each
        return each, {"num_cpus": each}

    def start(self, number: int) -> Any:
        self.started.append(self.actor.remote(number))
        return self.started[-1]

    def call(self, worker: Any, method: str, *arguments: Any) -> Any:
        return getattr(worker, method).remote(*arguments)

    def wait(self, calls: Sequence[Any], seconds: float) -> Sequence[Any]:
        ready: Sequence[Any] = self.ray.wait(list(calls), num_returns=1, timeout=seconds)[0]
        return ready

    def result(self, call: Any) -> Any:
        known = self.ray.exceptions
        try:
            return self.ray.get(call)
        except known.RayTaskError as error:
            raise error.cause if isinstance(error.cause, Exception) else error from error
        except known.RuntimeEnvSetupError as error:
            raise ConfigError(
                f"a worker cannot be prepared on a machine of {CLUSTER} ({first_line(error)}): see the logs of its Ray"
            ) from error
        except (
            known.RayActorError,  # its process has ended, or cannot be reached
            known.ObjectLostError,
            known.OutOfMemoryError,  # Ray's monitor has killed it
            known.NodeDiedError,
            known.LocalRayletDiedError,
            known.WorkerCrashedError,
            known.ActorUnschedulableError,
        ) as error:
            raise DiedError(first_line(error)) from error

    def end(self, worker: Any) -> None:
        self.started.remove(worker)
        try:
            self.ray.kill(worker, no_restart=True)
        except Exception as error:  # it was not there any more
            log.info("a worker could not be ended", exc_info=error)

    def close(self) -> None:
        """Ends all workers and leaves the cluster, which ends too if it was made for this run."""
        for worker in [*self.started]:
            self.end(worker)
        if self.own:
            with restored():
                self.ray.shutdown()


def _connect(ray: Any, device: str) -> None:
    """Raises ConfigError if the cluster does not answer."""
    quiet = {"log_to_driver": False, "configure_logging": False, "logging_level": logging.ERROR}
    address = os.environ.get(CLUSTER)
    try:
        if not address:
            count = None if device == "cuda" else len(usable())
            ray.init(address="local", num_cpus=count, include_dashboard=False, **quiet)
            return
        ray.init(address=address, runtime_env={"env_vars": forwarded_env()}, **quiet)
    except Exception as error:  # Ray's are of any class
        log.info("Ray could not be started", exc_info=error)
        why = f"({first_line(error)})"
        if address:
            raise ConfigError(
                f"{CLUSTER}={address} is no cluster that Ray can use {why}: start one with ray start --head, set "
                f"RAY_AUTH_MODE=token if it has a token, or unset {CLUSTER}"
            ) from error
        raise ConfigError(f"Ray cannot start on this machine {why}: see run.log, or set RAY_TMPDIR=/tmp") from error


def answer_nobody() -> None:
    """A cluster that this process makes listens on all of the machine's addresses. It answers to nobody who has not its
    token."""
    if os.environ.setdefault("RAY_AUTH_MODE", "token") == "token":
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


def _refuse(workers: int, there: int, kind: str) -> None:
    if there < workers:
        raise ConfigError(
            f"workers={workers} is not possible with the {there} {kind}{'s' * (there != 1)} of the cluster: each "
            f"worker needs its own, so it must be {there} at most"
        )


def most_each(nodes: Sequence[int], workers: int) -> int:
    """The most cores that each of so many workers can have, on machines of so many cores."""
    each = max([1, *nodes])
    while each > 1 and sum(math.floor(count / each) for count in nodes) < workers:
        each -= 1
    return each
