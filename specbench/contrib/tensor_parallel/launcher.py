"""target.tensor_parallel=N: starts the N processes of a run under torchrun's agent, and is what all but rank 0 do."""

import gc
import json
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from specbench.config.validate import ValidatedConfig
from specbench.contrib.tensor_parallel.process_group import PARENT_ARGV, join, started_processes
from specbench.decoding import processes as sync
from specbench.errors import ConfigError, IncompleteError, VerdictError, stop
from specbench.run.child_command import child_overrides
from specbench.run.signals import exit_code, restored

log = logging.getLogger(__name__)
AGENT = (signal.SIGHUP, signal.SIGQUIT)  # the agent sets handlers of these too
GRACE = 20.0  # seconds in which another rank than 0 leaves it to rank 0 to say what is wrong
ENDING = 120  # seconds from the end of a rank, or a signal, until what is left of the others is killed
SAID = (1, 2, 3, 130, 143)  # exit codes of rank 0, which has said why
Failures = dict[int, int]  # exit codes that are not 0, by rank; of a signal its number below 0


def run_elsewhere(checked: ValidatedConfig, out_dir: Path, skip_finished: bool) -> bool | None:
    """What becomes of a run whose target several processes share. Starts them and returns whether anything ran, or
    returns None if this process is the first of them and has joined the others, or starts processes for `repeats`.
    Raises ConfigError, VerdictError, or IncompleteError if they have left no result."""
    wanted, here = checked.choices["target"].settings.processes(), started_processes()
    from specbench.contrib.tensor_parallel.rules import refuse_indivisible

    if here == 1:
        refuse_indivisible(checked.choices)
        _refuse_few_devices(wanted, checked.choices.device)
        return None if checked.root.repeats > 1 else _run_ranks(checked, out_dir, wanted, skip_finished)
    if here != wanted:
        raise ConfigError(
            f"target.tensor_parallel={wanted} is not possible in a group of {here} processes (WORLD_SIZE): start "
            f"{wanted}, or none, and python -m specbench starts them"
        )
    if skip_finished or checked.root.repeats > 1:
        raise ConfigError(
            "a sweep and repeats are not possible under torchrun: python -m specbench starts the processes of each run"
        )
    if checked.choices.device == "cpu" and torch.cuda.is_available():
        raise ConfigError(
            "device=cpu with target.tensor_parallel is not possible under torchrun where transformers sees GPUs: set "
            "CUDA_VISIBLE_DEVICES to nothing, or have python -m specbench start the processes"
        )
    join("cuda" if checked.choices.device.startswith("cuda") else "cpu")
    if sync.current.is_first_rank:
        return None
    gc.enable()
    run_worker_rank(checked)
    return True


def _refuse_few_devices(wanted: int, device: str) -> None:
    """Raises ConfigError if there is no GPU for each process."""
    if device != "cpu" and wanted > (count := torch.cuda.device_count()):
        raise ConfigError(
            f"target.tensor_parallel={wanted} is not possible with {count} CUDA devices, one for each process: choose "
            f"{count} at most, or device=cpu"
        )


def run_worker_rank(checked: ValidatedConfig) -> None:
    """What a rank other than 0 does: the same forwards as rank 0, without files, log and output. What rank 0 can say
    too is left to it."""
    from specbench.config.build import build
    from specbench.run.run import run_in_turn

    for logger in (logging.getLogger(), logging.getLogger("specbench")):
        logger.handlers.clear()
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    try:
        parts = build(checked)
        with tempfile.TemporaryDirectory(prefix="specbench-rank-") as folder:
            run_in_turn([[(parts, Path(folder), lambda group: None)]], lambda done, total, what: None)
    except KeyboardInterrupt:
        sys.exit(exit_code())  # so that the others are ended, should none of them have had the signal
    except (ConfigError, IncompleteError) as error:
        try:
            time.sleep(GRACE)
        except KeyboardInterrupt:  # rank 0 has said it, and this rank is ended
            sys.exit(1)
        stop(f"rank {sync.current.rank}: {error}", 2 if isinstance(error, ConfigError) else 1)


def _run_ranks(checked: ValidatedConfig, out_dir: Path, processes: int, skip_finished: bool) -> bool:
    """Starts the processes and waits for their end. Returns whether they ran."""
    from specbench.results.completion import examine

    if skip_finished and not checked.root.force and examine(out_dir, checked.identity()).finished:
        return False
    log.info("%d processes share the target", processes)
    words = [sys.executable, "-m", "specbench", *child_overrides(out_dir)]
    failures = run_processes(words, processes, checked.choices.device, quiet=skip_finished)
    if failures:
        _raise(failures, out_dir, quiet=skip_finished)
    return True


def _raise(failures: Failures, out_dir: Path, quiet: bool) -> None:
    """Raises what the exit codes of ranks mean or, unless `quiet`, ends the program with that of rank 0, which has said
    why."""
    code = failures.get(0)
    if code == 3:
        raise VerdictError(f"strict=true: the verdict is not good, see {out_dir}")
    if code in SAID and not quiet:
        raise SystemExit(code)
    rank, code = min(failures.items(), key=lambda found: (found[1] == -signal.SIGTERM, found))  # the agent's signal
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    raise IncompleteError(f"rank {rank} of target.tensor_parallel {how}, so the others were ended: see {out_dir}")


def run_processes(words: Sequence[str], processes: int, device: str, quiet: bool = False) -> Failures:
    """Runs a command in so many ranks under the agent that torchrun runs, `quiet` without what they print. Once one has
    ended with an error, the others are ended. Returns the exit codes that are not 0. Raises KeyboardInterrupt after a
    signal, when they have ended."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # its errors are told here
    with (
        tempfile.TemporaryDirectory(prefix="specbench-ranks-") as folder,
        _environment(processes, device),
        restored(*AGENT),
    ):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id="specbench",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(folder, redirects=Std.OUT if quiet else Std.NONE),
        )
        try:
            elastic_launch(config, words[0])(*words[1:])
        except ChildFailedError as error:
            return {rank: int(failure.exitcode) for rank, failure in error.failures.items()}
        except SignalException as error:
            raise KeyboardInterrupt(f"the processes of the run were ended by {error.sigval.name}") from None
    return {}


@contextmanager
def _environment(processes: int, device: str) -> Iterator[None]:
    """Inside this context processes that are started share the cores, and see no GPU if the run is on the CPU."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    before = dict(os.environ)
    own: dict[str, Any] = {"OMP_NUM_THREADS": _threads(before.get("OMP_NUM_THREADS"), max(1, cores // processes))}
    own[PARENT_ARGV] = json.dumps(sys.argv)
    if device == "cpu":  # transformers would divide a model among GPUs that it sees
        own["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.update({key: str(value) for key, value in own.items()})
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(ENDING))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _threads(wanted: str | None, share: int) -> int:
    """Threads of each process, whose share of the cores is so large: as OMP_NUM_THREADS says, but no more."""
    if wanted is None or not wanted.isdecimal() or not int(wanted):
        return share
    if int(wanted) > share:
        log.warning("OMP_NUM_THREADS=%s is more than each process's share of the cores: each has %d", wanted, share)
    return min(int(wanted), share)
